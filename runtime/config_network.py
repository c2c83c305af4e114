# SPDX-License-Identifier: Apache-2.0
"""How capsules reach what lies outside the cluster: the table [network] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .config_values import Choice, HostOrNone


class Outside(StrEnum):
    """Whose address hosts outside the cluster see."""

    HOST = "host"  # that of the host which the capsule is on: a move breaks such connections
    RELAY = "relay"  # that of one host, through which all of them go: they outlast a move


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The way out of the overlay."""

    outside: Annotated[Outside, Choice(Outside)] = Outside.HOST
    relay: Annotated[str, HostOrNone()] = ""  # "": the host with the orchestrator's address
