# SPDX-License-Identifier: Apache-2.0
"""Says what happened, in one sentence: for the page, the document and the terminal."""

from __future__ import annotations

from . import quantities as q
from .evidence import unseen
from .record import DowntimeReport


def headline(report: DowntimeReport) -> str:
    """Return what happened, in one sentence without a full stop."""
    total = sum(v.steps for v in report.verdicts)
    equal = sum(v.equal for v in report.verdicts)
    if total == 0:
        result = "no losses to compare"
    elif report.bit_identical:
        result = f"{equal} of {total} losses equal to the bit"
    elif equal == total:
        result = f"{equal} of {total} losses equal, but the final parameters differ"
    else:
        first = min(v.first_difference for v in report.verdicts if v.first_difference is not None)
        result = f"{total - equal} of {total} losses differ, first at step {first}"
    move = report.move
    moved = f"Rank {move.ranks[0]} moved from {move.source} to {move.destination}"
    doubts = unseen(report)
    if report.gap is None or doubts:
        return f"{moved}, but the steps do not confirm that: {doubts[0]}, {result}"
    return f"{moved} while it trained: paused for {q.pause(report.gap.seconds)}, {result}"
