# SPDX-License-Identifier: Apache-2.0
"""Reports that compare a moved run with an undisturbed one: as a page, as JSON and as a table."""

from . import gaps
from .document import as_json
from .evidence import counted, doubts, steps_by_host
from .expected import Expected, ExpectedPart
from .headline import headline
from .page import render, write
from .phases import phase_table
from .record import (
    DowntimeReport,
    RankRun,
    ReportedMigration,
    ReportedStep,
)
from .training_log import read_rank

__all__ = [
    "DowntimeReport",
    "Expected",
    "ExpectedPart",
    "RankRun",
    "ReportedMigration",
    "ReportedStep",
    "as_json",
    "counted",
    "doubts",
    "gaps",
    "headline",
    "phase_table",
    "read_rank",
    "render",
    "steps_by_host",
    "write",
]
