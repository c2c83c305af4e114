# SPDX-License-Identifier: Apache-2.0
"""The training time that a move costs, of jobs whose clock is made up.

Each job makes steps of a known length; beats and looks see what the real ones would see of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import mean

import pytest

from liveshift.runtime.agent.host.usual_rate import UsualRate
from liveshift.runtime.cost.lost_time import (
    AFTER_S,
    COLLECTIVES,
    RUN_TIME,
    WATCH_S,
    NotMeasured,
    level,
    lost_s,
)
from liveshift.runtime.messages import Worked

Speed = Callable[[float], float]
"""Steps' speed at a moment; 1 is usual, 0 stands."""


@dataclass
class MadeUp:
    """A job of steps of ``step_s``, each with so many collectives at its end, one after the other;
    ``speed`` says when it is slower."""

    step_s: float
    speed: Speed = lambda _: 1.0
    collectives: int = 1
    _done: list[float] = field(default_factory=list)  # progress in steps, every ms

    def count(self, moment: float) -> int:
        ms = 0.001
        while len(self._done) <= moment / ms:
            last = self._done[-1] if self._done else 0.0
            self._done.append(last + ms * self.speed(len(self._done) * ms) / self.step_s)
        whole, part = divmod(self._done[int(moment / ms)], 1.0)
        burst = max(0.0, part - 0.8) / 0.2  # the last fifth of a step
        return int(whole) * self.collectives + int(burst * self.collectives)


def measured(
    job: MadeUp, asked: float, over: float, chance: Random, heartbeat_s: float = 0.4
) -> float:
    """What the product says of a move from ``asked`` to ``over``."""
    usual, now = UsualRate(), chance.random() * heartbeat_s
    while now < asked:
        usual.heartbeat(now, job.count(now))
        now += heartbeat_s * (1 + 0.1 * chance.random())
    begin = usual.level(asked)
    assert begin is not None
    source = Worked(COLLECTIVES, begin, None, job.count(asked), usual.typical(), 0, 0)
    looks, when = [], over + AFTER_S
    while when < over + AFTER_S + WATCH_S:
        looks.append((when, float(job.count(when))))
        when += 0.05 * (1 + 0.2 * chance.random())
    seen = level(looks)
    there = float(job.count(over))
    end = Worked(COLLECTIVES, there, seen.count, there, seen.rate, seen.moment - over, 0)
    return lost_s(over - asked + end.seconds, source, end)


def several(job: Callable[[], MadeUp], asked: float, over: float) -> list[float]:
    chance = Random(21)
    return [measured(job(), asked + 0.37 * n, over + 0.37 * n, chance) for n in range(9)]


def held_up(
    step_s: float,
    asked: float,
    over: float,
    seconds: float,
    *,
    begin: float,
    speed: float = 0.0,
    collectives: int = 1,
) -> list[float]:
    """What is said of nine jobs that have this speed for so many seconds from ``begin`` on, and are
    moved then: each at another point of its steps."""
    found = []
    for n in range(9):
        later = 0.37 * n

        def at(moment: float, begin: float = begin + later) -> float:
            return speed if begin <= moment < begin + seconds else 1.0

        job = MadeUp(step_s, at, collectives)
        found.append(measured(job, asked + later, over + later, Random(n)))
    return found


@pytest.mark.parametrize("collectives", [1, 3, 20])
def test_a_job_that_stands_loses_that_time(collectives: int) -> None:
    found = held_up(0.2, 30, 33, 1.5, begin=30.5, collectives=collectives)
    assert mean(found) == pytest.approx(1.5, abs=0.05)
    assert all(abs(each - 1.5) < 0.15 for each in found), found


def test_a_job_that_nothing_holds_up_loses_nothing() -> None:
    found = several(lambda: MadeUp(0.15), 40, 45)
    assert mean(found) < 0.06
    assert max(found) < 0.15


def test_a_fifth_of_its_speed_for_ten_seconds_is_two_seconds() -> None:
    found = held_up(0.2, 40, 50, 10, begin=40, speed=0.8)
    assert mean(found) == pytest.approx(2.0, abs=0.1)


def test_a_checkpoint_before_the_move_is_no_part_of_its_cost() -> None:
    """The job stood for 2 s, 3 s before; neither its usual rate nor where it is suffers by that."""

    def job() -> MadeUp:
        return MadeUp(0.2, lambda t: 0.0 if 37 <= t < 39 else 1.0)

    found = [measured(job(), 42 + 0.03 * n, 45 + 0.03 * n, Random(n)) for n in range(9)]
    assert mean(found) < 0.15, found


def test_long_steps_are_seen_in_part() -> None:
    found = held_up(0.9, 60, 64, 3, begin=60.5)
    assert mean(found) == pytest.approx(3.0, abs=0.2)
    assert all(abs(each - 3.0) < 0.6 for each in found), found


def worked(begin: float, end: float | None, rate: float = 10.0, why_not: str = "") -> Worked:
    return Worked(COLLECTIVES, begin, end, begin, rate, 0.0, 0.0, 0, why_not)


def test_each_host_counts_its_own_part_of_run_time() -> None:
    source = Worked(RUN_TIME, 9_000.0, 12_000.0, 9_000.0, 1000.0, 0.0, 0.0)
    end = Worked(RUN_TIME, 0.0, 3_500.0, 0.0, 1000.0, 0.0, 0.0)
    assert lost_s(8.0, source, end) == pytest.approx(1.5)


def test_a_faster_host_is_held_against_its_own_rate() -> None:
    source = worked(100.0, None)
    assert lost_s(4.0, source, worked(110.0, 140.0, rate=20.0)) == pytest.approx(1.5)
    # A little more or less is noise: of a rate that was looked at for seconds only.
    assert lost_s(4.0, source, worked(110.0, 130.0, rate=11.0)) == pytest.approx(1.0)


def test_one_that_stays_is_its_own_other_side() -> None:
    here = worked(100.0, 130.0)
    assert lost_s(4.0, here, here) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("source", "end", "why"),
    [
        (worked(100.0, None), worked(3.0, 9.0), "went back"),
        (worked(100.0, None), worked(110.0, 105.0), "went back"),
        (worked(100.0, None, why_not="not long enough"), worked(110.0, 120.0), "not long enough"),
        (worked(100.0, None), worked(0.0, None, why_not="the job ended"), "the job ended"),
        (worked(100.0, None), worked(110.0, None), "the job ended, or moved on, before"),
    ],
)
def test_what_cannot_be_told_is_not_measured(source: Worked, end: Worked, why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        lost_s(4.0, source, end)


def test_a_count_that_stops_or_goes_back_is_no_level() -> None:
    with pytest.raises(NotMeasured, match="no progress in 8 s"):
        level([(0.0, 5.0), (8.0, 5.0)])
    with pytest.raises(NotMeasured, match="went back"):
        level([(0.0, 5.0), (1.0, 6.0), (2.0, 1.0)])
