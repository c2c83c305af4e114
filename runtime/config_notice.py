# SPDX-License-Identifier: Apache-2.0
"""How soon a tainted host must be empty, by its severity: [within] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .config_values import Seconds


class Severity(StrEnum):
    """Why a host must become empty; each has a deadline of its own in the cluster file."""

    MAINTENANCE = "maintenance"  # an operator wants to work on the host
    FAILING = "failing"  # the host still works: memory errors, a fan, a GPU that retires pages
    NOTICE = "notice"  # the host will be taken away: a spot instance, a power cut


@dataclass(frozen=True, kw_only=True)
class WithinSettings:
    """Seconds until the host must be empty; None: it has no deadline."""

    maintenance: Annotated[float | None, Seconds()] = None
    failing: Annotated[float | None, Seconds()] = None
    notice: Annotated[float | None, Seconds()] = None

    def of(self, severity: str) -> float:
        """Seconds for this severity; 0 if it has no deadline, and for the severity ""."""
        return getattr(self, severity) or 0.0 if severity else 0.0
