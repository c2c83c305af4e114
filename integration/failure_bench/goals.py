# SPDX-License-Identifier: Apache-2.0
"""What is wanted of the figures, and whether it is so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench_record import Goal, at_most

from liveshift.runtime.model.interval import SnapshotCost, interval

from .record import Result, Run

FIRST = ((0.5, 2.0), (4.0, 4.0))
"""Ranks of at most so many GB; seconds after the suspicion until the first new step."""
PAUSE_S, PAUSE_GB = 0.4, 0.5
FAILURE_S, COST = 8 * 3600.0, 0.5
"""One failure in so many seconds; what snapshots may cost then, in per cent of the speed. A job
that leaves cores idle pays for pauses only. One that uses all cores also pays for CPU time."""


def judge(run: Run) -> None:
    """Fill in the goals of every case, and of the run."""
    for result in run.cases:
        result.goals = list(of_case(result, run.cores))
    judged = [(r, g) for r in run.cases for g in r.goals if g.met is not None]
    run.goals = [
        _all(name, [(r, g) for r, g in judged if g.name == name])
        for name in dict.fromkeys(g.name for _, g in judged)
    ]
    run.goals += against_others(run.cases)
    run.goals += under_failures(run.cases)
    failed = [f"{r.case.name}, {what}: {why}" for r in run.cases for what, why in r.failed.items()]
    failed += [f"{r.case.name}: {r.skipped}" for r in run.cases if r.skipped]
    if failed:
        words = "; ".join(each.splitlines()[0] for each in failed)
        run.goals.insert(
            0, Goal("everything could be measured", "yes", f"{len(failed)} not", False, words)
        )


def of_case(result: Result, cores: int) -> Iterable[Goal]:
    """Those of liveshift's own cases. The worst of the kills counts."""
    if result.case.way != "rewind":
        return
    wanted = next((each for each in FIRST if result.case.gb <= each[0]), None)
    if result.kills and wanted is not None:
        assert result.first_step_most_s is not None
        above = result.first_step_most_s - result.case.suspicion
        name = f"first new step after the suspicion, ranks of up to {wanted[0]:g} GB, worst kill"
        yield at_most(name, above, wanted[1], " s", _where(result))
    if result.pause_s is not None and result.case.gb <= PAUSE_GB:
        worst = f"the longest {max(result.pauses):.2f} s"
        name = f"pause of a snapshot, ranks of up to {PAUSE_GB:g} GB, median"
        yield at_most(name, result.pause_s, PAUSE_S, " s", worst)
        yield _steady("pauses at one failure in 8 h", result.pause_s)
        if result.snapshot_cpu_s is not None:
            name = "pauses and CPU time at one failure in 8 h, of a job that uses all cores"
            yield _steady(name, result.pause_s + result.snapshot_cpu_s / cores)
    if result.alarm_lost_s is not None:
        name = "lost by a false alarm: a host cut off for a second longer than the suspicion"
        yield Goal(name, "–", f"{result.alarm_lost_s:.2f} s", None)
    if result.identical is not None:
        seen = "yes" if result.identical else "no"
        yield Goal("equal to the bit", "yes", seen, result.identical, result.difference)


def _steady(name: str, cost: float) -> Goal:
    """``cost``: seconds of training that one snapshot takes. It is judged at the interval that
    loses least (Young and Daly). Where that would take more than COST per cent of the speed,
    ``snapshots.every = "auto"`` chooses a longer one, and more is repeated after a failure."""
    best = interval(SnapshotCost(cost), FAILURE_S, 1.0, 0.0)
    chosen = interval(SnapshotCost(cost), FAILURE_S, COST / 100, 0.0)
    words = f"a snapshot takes {cost:.2f} s, every {best:.0f} s"
    if chosen > best:
        words += f"; auto takes one every {chosen:.0f} s instead"
    return at_most(f"{name}, of the speed", 100 * cost / best, COST, " %", words)


def _where(result: Result) -> str:
    parts = []
    if result.noticed_s is not None:
        parts.append(f"noticed after {result.noticed_s:.2f} s in the median")
    worst = max(result.kills, key=lambda each: each.first_step_s)
    return "; ".join([*parts, worst.told])


def against_others(cases: Sequence[Result]) -> Iterable[Goal]:
    """Lost time as a ratio to ours, each way as it is by default; nothing is wanted of it."""
    for other in ("checkpoint-restart", "torchft"):
        ratios = []
        for job in dict.fromkeys(r.case.job for r in cases):
            ours, theirs = (_slowest(cases, way, job) for way in ("rewind", other))
            if ours and theirs and ours.lost_s and theirs.lost_s:
                each, ranks = job
                ratio = theirs.lost_s / ours.lost_s
                ratios.append(f"{ranks} ranks of {each} GB: {ratio:.1f} ×")
        if ratios:
            yield Goal(f"lost by {other} against rewind", "–", ", ".join(ratios), None)


def under_failures(cases: Sequence[Result]) -> Iterable[Goal]:
    """What the jobs took that met failures all the time; nothing is wanted of it."""
    for job in dict.fromkeys(r.case.job for r in cases):
        found = [
            f"{r.case.way}, {r.case.suspicion:g} s: {r.job_ratio:.2f} × ({len(r.met)} failures)"
            for r in cases
            if r.case.job == job and r.met and r.job_ratio
        ]
        if found:
            each, ranks = job
            name = f"time of a job under failures, {ranks} ranks of {each} GB, against untouched"
            yield Goal(name, "–", ", ".join(found), None)


def _slowest(cases: Sequence[Result], way: str, job: tuple[str, int]) -> Result | None:
    """The case with the way's default suspicion."""
    found = [r for r in cases if r.case.way == way and r.case.job == job and r.kills]
    return max(found, key=lambda r: r.case.suspicion, default=None)


def _all(name: str, told: Sequence[tuple[Result, Goal]]) -> Goal:
    missed = [(r, g) for r, g in told if not g.met]
    seen = f"{len(told) - len(missed)} of {len(told)} cases"
    reason = "; ".join(
        f"{r.case.name}: {g.seen}" + (f", {g.reason}" if g.reason else "") for r, g in missed
    )
    return Goal(name, told[0][1].wanted, seen, not missed, reason)
