# SPDX-License-Identifier: Apache-2.0
"""What becomes of jobs that have ended: the table [jobs] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .config_values import WholeNumber


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Of the jobs that have ended the last ``keep_ended`` are kept, with their output; what the
    journal tells of the others stays in the history."""

    keep_ended: Annotated[int, WholeNumber(1, 10_000)] = 20
