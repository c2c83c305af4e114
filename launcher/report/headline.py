# SPDX-License-Identifier: Apache-2.0
"""Says what happened, in one sentence: for the page, the document and the terminal."""

from __future__ import annotations

from . import quantities as q
from .evidence import unseen
from .record import DowntimeReport, ReportedMigration


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
    if (move := report.principal) is None:
        return f"Two runs, nothing moved: {result}"
    doubts = [why for m in report.migrations if m.committed for why in unseen(report, m)]
    if doubts:
        made = happened(report.migrations, trained=False)
        return f"{made}, but the steps do not confirm that: {doubts[0]}, {result}"
    downtime = report.downtime_s(move)
    longest = "longest pause" if len(report.migrations) > 1 else "paused for"
    paused = "no pause seen" if downtime is None else f"{longest} {q.pause(downtime)}"
    return f"{happened(report.migrations)}: {paused}, {result}"


def happened(migrations: tuple[ReportedMigration, ...], trained: bool = True) -> str:
    """Return who moved where: the part of the headline before the colon. ``trained``: whether the
    steps show that the job trained before and after the move."""
    if len(migrations) > 1:
        made, asked = sum(m.committed for m in migrations), len(migrations)
        many = f"{asked} moves" if made == asked else f"{made} of {asked} moves"
        return f"{many} made while the job trained" if trained else f"{many} made"
    move = migrations[0]
    who = who_moved(move)
    if not move.committed:
        return f"{who} stayed on {move.source}, the move to {move.destination} failed"
    they = "they" if len(move.ranks) > 1 else "it"
    way = f"{who} moved from {move.source} to {move.destination}"
    return f"{way} while {they} trained" if trained else way


def who_moved(move: ReportedMigration) -> str:
    if not move.ranks:
        return f"Capsule {move.capsule}"
    noun = "Rank" if len(move.ranks) == 1 else "Ranks"
    return f"{noun} {q.words(tuple(map(str, move.ranks)))}"
