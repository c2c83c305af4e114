# SPDX-License-Identifier: Apache-2.0
"""How soon a tainted host must be empty, by its severity: [within] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .config_values import Seconds


class Severity(StrEnum):
    """Why a host is tainted, as far as it tells how much time there is."""

    MAINTENANCE = "maintenance"  # a person wants it empty
    FAILING = "failing"  # it works still: memory errors, a fan, a GPU that retires pages
    NOTICE = "notice"  # it will be taken away: a spot instance, power


@dataclass(frozen=True, kw_only=True)
class WithinSettings:
    """Seconds until the host must be empty; None: no matter."""

    maintenance: Annotated[float | None, Seconds()] = None
    failing: Annotated[float | None, Seconds()] = None
    notice: Annotated[float | None, Seconds()] = None

    def of(self, severity: str) -> float:
        """0 for no matter, and for no severity."""
        return getattr(self, severity) or 0.0 if severity else 0.0
