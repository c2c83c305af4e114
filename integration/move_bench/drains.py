# SPDX-License-Identifier: Apache-2.0
"""Drains with a deadline: whether a host is empty in time where the plan says that it will be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import msgspec
from lab_session import LabSession, a_lab
from moving_job import Job

from liveshift.runtime.messages import Evacuating, MigrationRow

from .cases import SETTLED_S, Case, Effort, around
from .machine import PATIENCE_S, training
from .record import Drain
from .steps import AFTER_S, StepTail

CAPSULES = (1, 2, 4)
"""A drained host has one of these numbers of capsules, each with the memory of CASE."""
CASE = Case("cold", 0.25, "unlimited")
PACE_S = 0.4
"""A step takes this many seconds, and the job sleeps for most of them: a host with several capsules
usually has a core for each."""
WITHIN_S = (10.0, 3.0, 30.0, 5.0, 60.0, 2.0)
"""The deadlines, one after the other. Two cores do not suffice to move four capsules within the
shortest ones."""
IN_TIME, TOO_LATE = 0, 124
"""Exit codes of ``liveshift drain --within``."""

Tell = Callable[[str], None]


def seconds(count: int) -> float:
    """About how long ``count`` drains take for each number of capsules."""
    return len(CAPSULES) * (25 + count * 14)


def measure(
    name: str, place: Path, count: int, effort: Effort, kept: Path, tell: Tell
) -> Iterator[tuple[list[Drain], list[StepTail]]]:
    """Drain a host ``count`` times for each number of capsules, there and back.

    Yields, for each number of capsules, the drains and the jobs' step logs, which are kept below
    ``kept``. Raises AssertionError when a move fails or a job ends.
    """
    for capsules in CAPSULES:
        with a_lab(name, place, "--hosts", "2", "--slots", str(max(CAPSULES))) as session:
            yield _of_host(session, capsules, count, effort, kept, tell)


def _of_host(
    session: LabSession, capsules: int, count: int, effort: Effort, kept: Path, tell: Tell
) -> tuple[list[Drain], list[StepTail]]:
    session.cli("taint", "host", "h1", "--reason", "all begin on h0")
    argv = training(CASE, effort, pace_s=PACE_S)
    jobs = [session.start(f"drain-{capsules}-{n}", argv) for n in range(capsules)]
    logs = [StepTail(job.out / "rank0.jsonl") for job in jobs]
    _go_on(jobs, logs, SETTLED_S)
    session.cli("untaint", "h1")
    found = []
    for number, within in zip(range(count), cycle(WITHIN_S), strict=False):
        host = f"h{number % 2}"
        tell(f"drains, {capsules} on the host: {number + 1} of {count}, within {within:g} s")
        found.append(_drain(session, jobs, host, within))
        session.cli("untaint", host)
        _go_on(jobs, logs, AFTER_S)
    for job, log in zip(jobs, logs, strict=True):
        job.stop()
        log.wait_end(PATIENCE_S)
        log.keep(kept / f"{job.name}.jsonl")
        shutil.rmtree(job.out)
    return found, [StepTail.kept(kept / f"{job.name}.jsonl") for job in jobs]


def _go_on(jobs: Sequence[Job], logs: Sequence[StepTail], settled_s: float) -> None:
    """Every job makes some steps, and trains for so many seconds."""

    def alive() -> None:
        for job in jobs:
            assert job.code() is None, f"{job.name} ended:\n{job.output()}"

    for log in logs:
        log.wait(log.look() + around(CASE), PATIENCE_S, alive)
    for log in logs:
        log.wait_after(log.times[-1] + settled_s, 1, PATIENCE_S, alive)


def _drain(session: LabSession, jobs: Sequence[Job], host: str, within: float) -> Drain:
    before = {f"{job.name}/0": (job, job.seen(0)) for job in jobs}
    words = ("drain", host, "--within", f"{within:g}s", "--reason", "a notice", "-o", "json")
    done = session.cli(*words, code=None, timeout=PATIENCE_S)
    assert done.code in (IN_TIME, TOO_LATE), done
    said = json.loads(done.out)
    rows = msgspec.convert(said["moves"], list[MigrationRow])
    assert said["empty"], said
    assert sorted(row.capsule for row in rows) == sorted(before), said
    for row in rows:
        job, seen = before[row.capsule]
        job.assert_moved(seen, row)
    plan = msgspec.convert(said["deadline"], Evacuating)
    return Drain(
        capsules=len(jobs),
        within_s=within,
        planned_s=plan.empty_s,
        late=sum(each.late for each in plan.capsules),
        empty_s=max(r.asked + r.seconds for r in rows) - min(r.asked for r in rows),
        in_time=done.code == IN_TIME,
        together=plan.together,
    )
