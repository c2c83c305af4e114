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


def counted(report: DowntimeReport, migration: ReportedMigration) -> tuple[Counted, ...]:
    """Count all ranks' steps around a freeze, back to the freeze before it and on to the next one.
    Returns () for a migration that froze nothing."""
    if (freeze := migration.freeze) is None:
        return ()
    others = [m.freeze for m in report.migrations if m is not migration and m.freeze]
    since = max((end for _, end in others if end <= freeze[0]), default=float("-inf"))
    until = min((begin for begin, _ in others if begin >= freeze[1]), default=float("inf"))
    return tuple(
        Counted(
            run.rank,
            dict(Counter(s.host for s in run.steps if since < s.time < freeze[0])),
            dict(Counter(s.host for s in run.steps if freeze[1] < s.time < until)),
        )
        for run in report.moved
    )


def doubts(report: DowntimeReport, least: int) -> list[str]:
    """Return one sentence for each claim that the steps do not support. The list is empty if each
    migration took place while its job trained, and every rank made ``least`` steps after it on the
    right host."""
    found = [] if report.migrations else ["nothing was moved"]
    for migration in report.migrations:
        name = migration.capsule
        found += [f"{name}, {why}" for why in unseen(report, migration)]
        for seen in counted(report, migration):
            found += [f"{name}: {why}" for why in _misplaced(seen, migration, least)]
        if not report.moved_by(migration):
            found.append(f"{name}: no rank of it is known")
    return found


def unseen(report: DowntimeReport, migration: ReportedMigration) -> list[str]:
    """Return why the steps of the ranks that a migration moved show no pause that it can have made;
    empty if they show one."""
    found = []
    for run in report.moved_by(migration):
        times = [s.time for s in run.steps]
        doubts = gaps.doubts(times, migration.phases, migration.started_at)
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
