# SPDX-License-Identifier: Apache-2.0
"""A job loses hosts and processes, and comes back. All ways lose the same, as far as they can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

from .cases import Case, Effort, Moment, moments
from .failures import Failure, Kind, schedule
from .history import History, Loss
from .record import Kill, Met, kill

PATIENCE_S = 90.0
"""Without any step: a restart takes half of it on a busy machine."""
READY_S = 60.0
SOON = 5
"""Steps before the last one, in which no failure is met any more."""

Tell = Callable[[str], None]


class Way(Protocol):
    """A job that is to survive the loss of its hosts, by one of the ways."""

    lab: Lab
    history: History

    def alive(self) -> None:
        """Raises AssertionError when the job has ended; called all the time."""

    def ready(self) -> bool:
        """Whether the job may lose a host now, as far as the way itself can tell."""

    def trained(self) -> bool:
        """Whether it would go on from a moment at which it trained."""

    def host_of(self, rank: int) -> str: ...

    def process_of(self, rank: int) -> int:
        """The pid of the process that trains as this rank, on this machine."""

    def noticed(self, cut: float) -> tuple[float | None, str]:
        """When the loss since ``cut`` was acted upon, in seconds since the epoch; what was said
        of it."""

    def lost(self, host: str) -> None:
        """The host was killed just now: what a scheduler would start at once."""

    def replace(self, host: str) -> None:
        """The host is to stand by from now on. It was killed, and the job goes on without it."""

    def restart(self, host: str) -> None:
        """A process of the host was killed, and the job goes on. What is to be started again for
        the next failure, if the way does not do so itself."""

    def ended(self) -> bool:
        """Whether the job has ended well."""

    def said(self) -> str:
        """What helps to understand a failure."""


def measure(way: Way, ranks: int, effort: Effort, tell: Tell) -> list[Kill]:
    """Kill a host at each moment, and wait until the job is where it was. Raises AssertionError
    when it does not come back."""
    found = []
    for number, moment in enumerate(moments(effort, ranks), 1):
        tell(f"kill {number} of {effort.kills}")
        found.append(_kill(way, moment, effort))
    return found


def meet_all(way: Way, case: Case, effort: Effort, tell: Tell) -> list[Met]:
    """Let the job meet the failures of the schedule until it has made its steps. Raises
    AssertionError when it does not come back."""
    found: list[Met] = []
    last = effort.steps
    for failure in schedule(effort, case.ranks):
        tell(f"step {way.history.reached()} of {last}, {len(found)} failures")
        met = _meet(way, failure, last - SOON)
        if met is None:
            break
        found.append(met)
    return found


def _kill(way: Way, moment: Moment, effort: Effort) -> Kill:
    _wait(way, lambda: way.history.reached() >= moment.step, f"step {moment.step}")
    time.sleep(moment.late * effort.pace)
    due = time.time()
    until = due + READY_S
    over = f"it was not ready to lose a host within {READY_S:g} s, or before its end"
    _wait(way, lambda: way.trained() or way.ended() or time.time() > until, over)
    assert way.trained(), over
    victim = way.host_of(moment.rank)
    cut = time.time()
    labs.kill_host(way.lab, victim)
    seen = _back(way, cut, moment.rank, victim)
    noticed, told = way.noticed(cut)
    if noticed is None and seen.began_s is not None:
        noticed = cut + seen.began_s
    to = way.host_of(moment.rank)
    assert to != victim, f"rank {moment.rank} trains on {victim}, which has no power"
    way.replace(victim)
    late = max(0.0, cut - due)
    return kill(seen, cut, moment.step, moment.rank, victim, to, late, noticed, told)


def _meet(way: Way, failure: Failure, last: int) -> Met | None:
    """One failure of the schedule; None if the job makes step ``last`` before that."""

    def over() -> bool:
        return way.history.reached() >= last

    _wait(way, lambda: over() or way.ready(), "the job to be whole")
    due = time.time() + failure.gap
    _wait(way, lambda: over() or (time.time() >= due and way.ready()), f"step {last}")
    if over():
        return None
    victim = way.host_of(failure.rank)
    cut = time.time()
    if failure.kind is Kind.HOST:
        labs.kill_host(way.lab, victim)
        way.lost(victim)
    else:
        os.kill(way.process_of(failure.rank), signal.SIGKILL)
    seen = _back(way, cut, failure.rank, victim)
    if failure.kind is Kind.HOST:
        way.replace(victim)
    else:
        way.restart(victim)
    return Met(
        kind=failure.kind,
        rank=failure.rank,
        host=victim,
        gap_s=failure.gap,
        lost_s=seen.lost_s,
        repeated=seen.repeated,
    )


def _back(way: Way, cut: float, rank: int, victim: str) -> Loss:
    """What it has cost, once the job is where it was when ``rank`` was lost."""
    back = partial(way.history.back, cut, time.time(), rank)
    _wait(way, lambda: back() is not None, f"the job to be where it was without {victim}")
    seen = back()
    assert seen is not None
    return seen


def _wait(way: Way, ready: Callable[[], bool], what: str) -> None:
    way.history.wait(ready, what, PATIENCE_S, way.alive)
