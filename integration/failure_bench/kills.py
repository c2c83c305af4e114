# SPDX-License-Identifier: Apache-2.0
"""Host after host of a job loses its power, at the moments that are the same for all ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

from .cases import Effort, Moment, moments
from .history import History
from .record import Kill

PATIENCE_S = 90.0
"""Without any step: a restart takes half of it on a busy machine."""
READY_S = 60.0

Tell = Callable[[str], None]


class Way(Protocol):
    """A job that is to survive the loss of its hosts, by one of the ways."""

    lab: Lab
    history: History

    def alive(self) -> None:
        """Raises AssertionError when the job has ended; called all the time."""

    def ready(self) -> bool:
        """Whether the job may lose a host now, as far as the way itself can tell."""

    def host_of(self, rank: int) -> str: ...

    def noticed(self, cut: float) -> tuple[float | None, str]:
        """When the loss since ``cut`` was acted upon, in seconds since the epoch; what was said
        of it."""

    def replace(self, host: str) -> None:
        """The host is to stand by from now on. It was killed, and the job goes on without it."""

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


def _kill(way: Way, moment: Moment, effort: Effort) -> Kill:
    history = way.history

    def wait(ready: Callable[[], bool], what: str) -> None:
        history.wait(ready, what, PATIENCE_S, way.alive)

    wait(lambda: history.reached() >= moment.step, f"step {moment.step}")
    time.sleep(moment.late * effort.pace)
    due = time.time()
    late = due + READY_S
    over = f"it was not ready to lose a host within {READY_S:g} s, or before its end"
    wait(lambda: way.ready() or way.ended() or time.time() > late, over)
    assert way.ready(), over
    victim = way.host_of(moment.rank)
    cut = time.time()
    labs.kill_host(way.lab, victim)
    dead = time.time()
    back = partial(history.back, cut, dead, moment.rank)
    wait(lambda: back() is not None, f"the job to be where it was without {victim}")
    seen = back()
    assert seen is not None
    noticed, told = way.noticed(cut)
    if noticed is None and seen.began_s is not None:
        noticed = cut + seen.began_s
    to = way.host_of(moment.rank)
    assert to != victim, f"rank {moment.rank} trains on {victim}, which has no power"
    way.replace(victim)
    return Kill(
        step=moment.step,
        rank=moment.rank,
        host=victim,
        to=to,
        late_s=max(0.0, cut - due),
        noticed_s=None if noticed is None else noticed - cut,
        first_step_s=seen.first_step_s,
        lost_s=seen.lost_s,
        new_step_s=seen.new_step_s,
        repeated=seen.repeated,
        repeated_s=seen.lost_s - seen.first_step_s,
        told=told,
    )
