# SPDX-License-Identifier: Apache-2.0
"""A run, from the labs to the verdict: case by case, each on labs of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from host_programs import emptied
from lab_place import lab_name
from lab_session import a_lab

from liveshift.errors import LiveshiftError

from . import alarms, kills, replicas
from .cases import (
    ALARMED_STEPS,
    UNTOUCHED,
    Case,
    Effort,
    compared_steps,
    lacking,
    last_step,
)
from .elastic import Elastic
from .goals import judge
from .history import WARM, History
from .hosts import plain_lab
from .kills import Way
from .ours import Rewinding
from .record import Result, Run
from .replicas import Replicated

START_S, END_S = 240.0, 60.0
"""How long a job may take to its first step on a busy machine, and to its end after the last."""

Tell = Callable[[str], None]
References = dict[tuple[str, int], History]
"""The untouched runs, by Case.job."""


def bench(place: Path, cases: Sequence[Case], run: Run, path: Path, tell: Tell) -> None:
    """Measure what ``run`` does not have yet; ``path`` is kept after each case. A case that fails
    is noted, and the rest goes on."""
    began, before = time.monotonic(), run.seconds
    references: References = {}
    for case in cases:
        known = run.of(case)
        if known is not None and (case.way != UNTOUCHED or not _left(cases, run, case)):
            continue
        result = _case(case, run.effort, place, references, tell)
        if known is None:
            run.cases.append(result)
        _keep(run, path, before + time.monotonic() - began)
    run.complete = True
    _keep(run, path, before + time.monotonic() - began)


def _left(cases: Sequence[Case], run: Run, untouched: Case) -> bool:
    """Whether some of these are still to be compared with the untouched run of their job."""
    return any(run.of(case) is None for case in cases if case.job == untouched.job)


def _keep(run: Run, path: Path, seconds: float) -> None:
    untouched = {r.case.job: r for r in run.cases if r.case.way == UNTOUCHED}
    for result in run.cases:
        result.sum_up(untouched.get(result.case.job))
    judge(run)
    run.seconds = seconds
    run.write(path)


def _case(
    case: Case,
    effort: Effort,
    place: Path,
    references: References,
    tell: Tell,
) -> Result:
    result = Result(case)

    def said(text: str) -> None:
        tell(f"{case.name}: {text}")

    result.skipped = lacking(case)
    if case.way == "torchft" and not replicas.version():
        result.skipped = f"torchft is not in {replicas.PLACE}: FETCH=1 fetches it"
    if result.skipped:
        return result
    out = place / case.name
    if case.way == UNTOUCHED:
        with _failure_noted(result, "steady"):
            references[case.job] = _steady(result, effort, out, said)
            result.identical = True
        with _failure_noted(result, "schedule"):
            if effort.steps:
                _under_failures(result, effort, out, said)
        return result

    def compare(history: History, last: int) -> None:
        assert case.job in references, "the untouched run failed"
        result.difference = result.difference or history.differs(references[case.job], last)
        result.identical = not result.difference

    with _failure_noted(result, "kills"):
        compare(_kills(result, effort, out, said), last_step(effort))
    with _failure_noted(result, "steady"):
        if effort.steady:
            _steady(result, effort, out, said)
    with _failure_noted(result, "false alarms"):
        if effort.alarms and case.way == "rewind":
            compare(_false_alarms(result, effort, out, said), ALARMED_STEPS)
    with _failure_noted(result, "schedule"):
        if effort.steps:
            compare(_under_failures(result, effort, out, said), effort.steps)
    return result


@contextmanager
def _failure_noted(result: Result, what: str) -> Iterator[None]:
    """A failure costs one figure, not the run; the page and the exit code tell of it."""
    try:
        yield
    except (AssertionError, LiveshiftError) as failure:
        result.failed[what] = str(failure)[:4000]


def _kills(result: Result, effort: Effort, out: Path, tell: Tell) -> History:
    """The paced job, which loses one host after the other."""
    tell("starts")
    last = last_step(effort)
    with _job(result.case, effort, last, effort.pace, out) as job:
        result.kills = kills.measure(job, result.case.mortal, effort, tell)
        _to_its_end(job, last)
        _take_pauses(result, job)
        return job.history


def _steady(result: Result, effort: Effort, out: Path, tell: Tell) -> History:
    """The job as fast as it goes, and nothing happens."""
    tell("as fast as it goes")
    steps = effort.steady if result.case.way != UNTOUCHED else compared_steps(effort)
    with _job(result.case, effort, steps, 0.0, out) as job:
        if effort.steady:
            _take_cpu_time(result, job, effort.steady)
        _to_its_end(job, steps)
        _take_pauses(result, job)
        if effort.steady:
            result.steps_per_s = job.history.rate(effort.steady)
        return job.history


def _take_cpu_time(result: Result, job: Way, last: int) -> None:
    """Of the whole machine, so that nothing is forgotten that works for the job. In the snapshots
    that count, only what was written since the one before is copied."""
    history, ours = job.history, job if isinstance(job, Rewinding) else None

    def first() -> bool:
        snapshot = ours is None or ours.pauses or history.reached() >= last  # a short run has none
        return history.reached() >= WARM and bool(snapshot)

    history.wait(first, "its speed, and a snapshot", kills.PATIENCE_S, job.alive)
    begun, spent, seen = history.reached(), _busy(), len(ours.pauses) if ours else 0
    history.wait(lambda: history.reached() >= last, f"step {last}", kills.PATIENCE_S, job.alive)
    result.steady_steps = history.reached() - begun
    result.steady_snapshots = len(ours.pauses) - seen if ours else 0
    if result.steady_steps > 0:
        result.cpu_s_per_step = (_busy() - spent) / result.steady_steps


def _busy() -> float:
    """CPU seconds that this machine's cores have worked for itself since it was booted."""
    seen = psutil.cpu_times()
    return float(seen.user + seen.nice + seen.system + seen.irq + seen.softirq)


def _under_failures(result: Result, effort: Effort, out: Path, tell: Tell) -> History:
    """The paced job, which meets one failure after the other until it has made its steps."""
    tell("under failures")
    with _job(result.case, effort, effort.steps, effort.pace, out, standing_by=False) as job:
        if result.case.way != UNTOUCHED:
            result.met = kills.meet_all(job, result.case, effort, tell)
        _to_its_end(job, effort.steps)
        result.job_s = job.history.span(effort.steps)
        return job.history


def _false_alarms(result: Result, effort: Effort, out: Path, tell: Tell) -> History:
    """The paced job, whose hosts fall silent for a moment, one after the other."""
    case = result.case
    with _job(case, effort, ALARMED_STEPS, effort.pace, out) as job:
        assert isinstance(job, Rewinding)
        result.alarms = alarms.measure(job, case, effort, tell)
        _to_its_end(job, ALARMED_STEPS)
        return job.history


def _take_pauses(result: Result, job: Way) -> None:
    if isinstance(job, Rewinding):
        result.pauses += job.pauses.values()
        result.image_bytes = max(result.image_bytes or 0, job.image_bytes) or None


def _to_its_end(job: Way, last: int) -> None:
    history = job.history
    history.wait(lambda: history.reached() >= last, f"step {last}", kills.PATIENCE_S, job.alive)
    until = time.monotonic() + END_S
    while not job.ended():
        assert time.monotonic() < until, f"it has not ended within {END_S:g} s"
        time.sleep(0.1)
    job.history.look()


@contextmanager
def _job(
    case: Case, effort: Effort, steps: int, pace: float, out: Path, standing_by: bool = True
) -> Iterator[Way]:
    """The job in a lab of its own, in training; what it said is part of an AssertionError.
    ``standing_by``: torchrun has an agent on the spare host."""
    with ExitStack() as cleanup:
        job = _begun(case, effort, steps, pace, out, cleanup, standing_by)
        try:
            history = job.history
            history.wait(lambda: history.reached() > 0, "the first step", START_S, job.alive)
            if isinstance(job, Elastic) and case.way != UNTOUCHED:
                job.stand_by()
            yield job
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{job.said()}") from failure


def _begun(
    case: Case,
    effort: Effort,
    steps: int,
    pace: float,
    out: Path,
    cleanup: ExitStack,
    standing_by: bool,
) -> Way:
    if case.way == "rewind":
        options = ("--hosts", str(case.hosts), "--timeouts", f"suspicion={case.suspicion:g}")
        snapshots = ("--snapshots", f"every={effort.every:g}")
        session = cleanup.enter_context(a_lab(lab_name("b"), out.parent, *options, *snapshots))
        return Rewinding(session, case, steps, pace)
    lab = cleanup.enter_context(plain_lab(lab_name("b"), case.hosts))
    emptied(out)
    if case.way == "torchft":
        return Replicated(lab, case, steps, pace, out, cleanup)
    kind = {"saving": case.way != UNTOUCHED, "standing_by": standing_by}
    return Elastic(lab, case, effort, steps, pace, out, cleanup, **kind)
