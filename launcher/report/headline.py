# SPDX-License-Identifier: Apache-2.0
"""What happened, in one sentence: for the page, the document and the terminal."""

from __future__ import annotations

from . import quantities as q
from .record import Migration, Report


def headline(report: Report) -> str:
    """What happened, in one sentence without a full stop."""
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
    if (move := report.principal) is None:
        return f"Two runs, nothing moved: {result}"
    longest = "longest pause" if len(report.migrations) > 1 else "paused for"
    paused = f"{longest} {q.pause(report.downtime_s(move))}"
    return f"{happened(report.migrations)}: {paused}, {result}"


def happened(migrations: tuple[Migration, ...]) -> str:
    """Who moved where: the part of the headline before the colon."""
    if len(migrations) > 1:
        made, asked = sum(m.committed for m in migrations), len(migrations)
        many = f"{asked} moves" if made == asked else f"{made} of {asked} moves"
        return f"{many} made while the job trained"
    move = migrations[0]
    who = who_moved(move)
    if not move.committed:
        return f"{who} stayed on {move.source}, the move to {move.destination} failed"
    they = "they" if len(move.ranks) > 1 else "it"
    return f"{who} moved from {move.source} to {move.destination} while {they} trained"


def who_moved(move: Migration) -> str:
    if not move.ranks:
        return f"Capsule {move.capsule}"
    noun = "Rank" if len(move.ranks) == 1 else "Ranks"
    return f"{noun} {q.words(tuple(map(str, move.ranks)))}"
