# SPDX-License-Identifier: Apache-2.0
"""How much of what capsules print is kept: the table [logs] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..criu_glue.room import LOG_KEEP, LOG_MAX
from .config_values import Size, WholeNumber

LEAST = 1_000_000
"""Bytes of a file of the log at least: one record has up to 64 KiB."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """A capsule's output is in files of ``max`` bytes, of which the last ``keep`` are kept. The
    room of a capsule has what was set when it was built."""

    max: Annotated[int, Size('a size from "1MB" on', low=LEAST)] = LOG_MAX
    keep: Annotated[int, WholeNumber(1, 1000)] = LOG_KEEP
