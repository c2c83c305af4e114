# SPDX-License-Identifier: Apache-2.0
"""A run, from the lab to the verdict: case by case, what the links of a size share only once."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import psutil
from host_programs import emptied, inside
from lab_session import ROOT, LabSession, a_lab, environment

from liveshift import cores
from liveshift.errors import LiveshiftError
from liveshift.launcher import lab as labs

from . import by_hand, drains, limit, moves, restart
from .cases import BESIDE, LINKS, Case, Effort, lacking
from .goals import judge
from .machine import training
from .record import Limits, Result, Run
from .steps import StepTail

TIMEOUTS = "collective=3600"
"""A slow link with a large image takes minutes, which a job that is moved so would allow for."""

FREED_S = 15.0
"""How long the kernel may take to give back what ended processes had."""

IDLE_TIMES = 3
"""So often CRIU's fixed cost is measured, at most."""

Tell = Callable[[str], None]


def bench(
    name: str,
    place: Path,
    cases: Sequence[Case],
    run: Run,
    path: Path,
    tell: Tell,
    drained: int = 0,
) -> None:
    """Measure what ``run`` does not have yet, on labs ``name``; ``path`` is kept after each case.

    ``drained``: drains with a deadline, of each number of capsules. A figure that fails is noted,
    and the rest goes on.
    """
    kept = path.with_suffix("")
    if not run.cases:
        emptied(kept)
    began, before = time.monotonic(), run.seconds

    def save() -> None:
        for result in run.cases:
            result.sum_up()
        judge(run)
        run.seconds = before + time.monotonic() - began
        run.write(path)

    with ExitStack() as cleanup:
        lab = CaseLab(name, place, kept, cleanup)
        for _, group in groupby(cases, key=lambda case: (case.kind, case.gb)):
            same = list(group)
            for case in same:
                if run.of(case) is None:
                    alike = (r for r in run.cases if r.case.shared == case.shared)
                    run.cases.append(
                        _case(lab, case, next(alike, None), run.effort, place, kept, tell)
                    )
                    save()
            _restarts(
                lab, [found for case in same if (found := run.of(case))], run.effort, place, tell
            )
            save()
    if drained and not run.drains:
        _drains(name, place, drained, run, kept, tell)
        save()
    _compare_all(run, cases, place, kept, tell, save)
    run.complete = True
    save()


class CaseLab:
    """A lab of two hosts, made anew after something went wrong on it; what its daemons said then is
    below ``kept``."""

    def __init__(self, name: str, place: Path, kept: Path, cleanup: ExitStack) -> None:
        self._name, self._place, self._kept = name, place, kept
        self._up = cleanup.enter_context(ExitStack())
        self._session: LabSession | None = None
        self._way = ""

    def session(self, way: str = "") -> LabSession:
        """``way``: precopy.way of its cluster file; "" for whatever it has."""
        if self._session is not None and way and way != self._way:
            self._session = None
            self._up.close()
        if self._session is None:
            self._way = way or self._way or "auto"
            options: tuple[str, ...] = ("--hosts", "2", "--timeouts", TIMEOUTS)
            if self._way != "auto":
                options += ("--precopy", f"way={self._way}")
            self._session = self._up.enter_context(a_lab(self._name, self._place, *options))
        return self._session

    @contextmanager
    def failure_noted(self, result: Result, what: str) -> Iterator[None]:
        """A failure costs one figure, not the run; the page and the exit code tell of it."""
        try:
            yield
        except (AssertionError, LiveshiftError) as failure:
            result.failed[what] = str(failure)[:2000]
            if self._session is not None:
                said = self._session.last_words()
                (self._kept / f"{result.case.name}-{what.replace(' ', '-')}.failed").write_text(
                    said
                )
            self._session = None
            self._up.close()


def _compare_all(
    run: Run, cases: Sequence[Case], place: Path, kept: Path, tell: Tell, save: Callable[[], None]
) -> None:
    """When nothing is timed any more."""
    found = [result for case in cases if (result := run.of(case))]
    todo = [result for result in found if result.identical is None and _logs(kept, result.case)]
    groups = [list(group) for _, group in groupby(todo, key=lambda r: (r.case.kind, r.case.gb))]
    groups.sort(key=lambda results: -results[0].case.gb)
    if not groups:
        return
    tell(f"{len(groups)} jobs: the same untouched")
    with ThreadPoolExecutor(_at_once(groups, run.effort)) as pool:
        working = [pool.submit(_compare, each, run.effort, place, kept) for each in groups]
        for done in as_completed(working):
            done.result()
            save()


def _case(
    lab: CaseLab,
    case: Case,
    alike: Result | None,
    effort: Effort,
    place: Path,
    kept: Path,
    tell: Tell,
) -> Result:
    """``alike``: what was measured of the same job and link by another way."""
    result = Result(case)

    def said(text: str) -> None:
        tell(f"{case.name}: {text}")

    def session() -> LabSession:
        found = lab.session(case.way)
        for host in ("h0", "h1"):
            labs.link(found.lab, host, rate=LINKS[case.link])
        return found

    if alike is not None and alike.limit is not None:
        result.limit, result.by_hand = alike.limit, alike.by_hand
        return _ours(lab, result, session, effort, kept, said)
    with lab.failure_noted(result, "limit"):
        said("bare copy, and CRIU on idle processes")
        rate = limit.rate(session().lab)
        times = min(effort.moves, IDLE_TIMES)
        fixed = limit.fixed(lab.session().lab, place / "idle", effort.threads, times)
        result.limit = Limits(rate, fixed, cpu_s=limit.cpu())
    with lab.failure_noted(result, "by hand"):
        if effort.hands and not _lacks(result, "by hand"):
            log, out = kept / f"{case.name}-by-hand.jsonl", place / "by-hand"
            result.by_hand = by_hand.measure(session().lab, case, effort, out, log, said)
    return _ours(lab, result, session, effort, kept, said)


def _ours(
    lab: CaseLab,
    result: Result,
    session: Callable[[], LabSession],
    effort: Effort,
    kept: Path,
    said: Tell,
) -> Result:
    case = result.case
    with lab.failure_noted(result, "ours"):
        if not _lacks(result, "ours"):
            log = kept / f"{case.name}.jsonl"
            found = moves.measure(session(), case, effort, log, said)
            result.moves, result.resident_bytes, result.steps = found
    return result


def _lacks(result: Result, what: str) -> bool:
    until = time.monotonic() + FREED_S
    while (why := lacking(result.case)) and time.monotonic() < until:
        time.sleep(0.1)
    if why:
        result.skipped[what] = why
    return bool(why)


def _restarts(lab: CaseLab, results: list[Result], effort: Effort, place: Path, tell: Tell) -> None:
    """Once for all links of a job: they are not in the way of a checkpoint."""
    first = results[0]
    case = first.case
    with lab.failure_noted(first, "restart"):
        if effort.restarts and not first.restarts and not _lacks(first, "restart"):
            first.restarts = restart.measure(
                lab.session().lab,
                case,
                effort,
                place / "restart",
                lambda text: tell(f"{case.kind}, {case.gb:g} GB: {text}"),
            )
    for result in results[1:]:
        result.restarts = first.restarts


def _drains(name: str, place: Path, count: int, run: Run, kept: Path, tell: Tell) -> None:
    """Measure drains with a deadline, and compare every job with one untouched run."""
    logs: list[StepTail] = []
    for found, more in drains.measure(name, place, count, run.effort, kept, tell):
        run.drains += found
        logs += more
    tell("drains: the same untouched")
    ends = sorted({log.numbers[-1] for log in logs})
    reference = _reference(drains.CASE, run.effort, place / "reference-drains", ends)
    run.drained_difference = "; ".join(text for log in logs if (text := reference.differs(log)))


def _compare(results: Sequence[Result], effort: Effort, place: Path, kept: Path) -> None:
    """All links of a job with one run of it that nobody touches."""
    case = results[0].case
    logs = [(result, _logs(kept, result.case)) for result in results]
    ends = sorted({log.numbers[-1] for _, each in logs for log in each})
    out = place / f"reference-{case.kind}-{case.gb:g}"
    reference = _reference(case, effort, out, ends)
    for result, each in logs:
        unlike = [text for log in each if (text := reference.differs(log))]
        result.identical, result.difference = not unlike, "; ".join(unlike)


def _at_once(groups: Sequence[Sequence[Result]], effort: Effort) -> int:
    """So many runs that nobody times, as there are cores and memory for."""
    largest = sorted((results[0].case.size for results in groups), reverse=True)
    left = psutil.virtual_memory().available - BESIDE
    count = max(1, cores.threads(len(groups)) // effort.threads)
    while count > 1 and sum(largest[:count]) > left:
        count -= 1
    return count


def _logs(kept: Path, case: Case) -> list[StepTail]:
    names = (f"{case.name}.jsonl", f"{case.name}-by-hand.jsonl")
    return [StepTail.kept(kept / name) for name in names if (kept / name).exists()]


def _reference(case: Case, effort: Effort, out: Path, ends: Sequence[int]) -> Untouched:
    """The same program without anybody near it, as far as the longest of the others went; ``ends``:
    the steps after which these ended."""
    emptied(out)
    argv = inside(out, training(case, effort))
    argv[argv.index("--steps") + 1] = str(ends[-1])
    argv += ["--digests", ",".join(map(str, ends))]
    done = subprocess.run(
        argv, env=environment(), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"the reference run itself failed:\n{done.stdout}{done.stderr}"
    tail = StepTail(out / "rank0.jsonl")
    tail.wait_end(0.0)
    assert tail.numbers == list(range(1, ends[-1] + 1))
    digests = {step: json.loads((out / f"after{step}-0.json").read_text()) for step in ends}
    shutil.rmtree(out)
    return Untouched(tail, {step: found["sha256"] for step, found in digests.items()})


@dataclass(frozen=True)
class Untouched:
    """A run that nobody has moved: its log, and the digest of its parameters by step."""

    tail: StepTail
    digests: Mapping[int, str]

    def differs(self, log: StepTail) -> str:
        """What is not equal to the bit in another run, in words: the first loss, the parameters at
        its end, the data that it has held in memory; "" when nothing is."""
        name, last = log.path.stem, len(log.numbers)
        if log.numbers != self.tail.numbers[:last]:
            return f"{name} does not have every step once"
        for step, mine, theirs in zip(log.numbers, log.losses, self.tail.losses, strict=False):
            if mine != theirs:
                return f"{name} differs first in step {step}: {mine}, not {theirs}"
        if log.final["sha256"] != self.digests[last]:
            return f"{name} has other parameters after step {last}"
        if log.final["data"] != self.tail.final["data"]:
            return f"{name} has other data in memory"
        return ""
