# SPDX-License-Identifier: Apache-2.0
"""Checks whether the steps of a run support what its report claims of a migration.

A run can end well, equal to the bit, although its rank was moved after its last step. So the steps
of every rank before and after the freeze are counted, by the host where they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from . import gaps
from .record import DowntimeReport, RankRun, ReportedMigration


@dataclass(frozen=True)
class Counted:
    """Steps of one rank by host: those that ended before a freeze, and those after it."""

    rank: int
    before: Mapping[str, int]
    after: Mapping[str, int]


def counted(report: DowntimeReport) -> tuple[Counted, ...]:
    """Count all ranks' steps before the freeze and after it. Returns () if nothing was frozen."""
    if (freeze := report.move.freeze) is None:
        return ()
    return tuple(
        Counted(
            run.rank,
            dict(Counter(s.host for s in run.steps if s.time < freeze[0])),
            dict(Counter(s.host for s in run.steps if s.time > freeze[1])),
        )
        for run in report.moved
    )


def doubts(report: DowntimeReport, least: int) -> list[str]:
    """Return one sentence for each claim that the steps do not support. The list is empty if the
    migration took place while its job trained, and every rank made ``least`` steps after it on the
    right host."""
    name = report.move.capsule
    found = [f"{name}, {why}" for why in unseen(report)]
    for seen in counted(report):
        found += [f"{name}: {why}" for why in _misplaced(seen, report.move, least)]
    return found


def unseen(report: DowntimeReport) -> list[str]:
    """Return why the steps of the ranks that were moved show no pause that the migration can have
    made; empty if they show one."""
    found = [] if report.moved_ranks else ["no rank of it is known"]
    for run in report.moved_ranks:
        times = [s.time for s in run.steps]
        doubts = gaps.doubts(times, report.move.phases, report.move.started_at)
        found += [f"rank {run.rank}: {why}" for why in doubts]
    return found


def _misplaced(seen: Counted, migration: ReportedMigration, least: int) -> list[str]:
    moved = seen.rank in migration.ranks
    before = {migration.source} if moved else set(seen.before)
    after = {migration.destination} if moved else before
    found = []
    if set(seen.before) != before or len(before) != 1:
        found.append(
            f"rank {seen.rank} made its steps before the freeze on {steps_by_host(seen.before)}"
        )
    if set(seen.after) != after or sum(seen.after.values()) < least:
        wanted = f"{least} or more on {', '.join(sorted(after))} are wanted"
        found.append(
            f"rank {seen.rank} made {steps_by_host(seen.after)} after the freeze; {wanted}"
        )
    return found


def steps_by_host(steps: Mapping[str, int]) -> str:
    """Return ``83 steps on h1``, or ``no step``."""
    return ", ".join(f"{count} steps on {host}" for host, count in steps.items()) or "no step"


def hosts_of(run: RankRun) -> list[tuple[str, int]]:
    """Return the hosts where a rank made its steps, in order, and how many on each. A host to which
    it came back is named again."""
    found: list[tuple[str, int]] = []
    for step in run.steps:
        if found and found[-1][0] == step.host:
            found[-1] = step.host, found[-1][1] + 1
        elif step.host:
            found.append((step.host, 1))
    return found
