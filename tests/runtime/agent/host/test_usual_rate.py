# SPDX-License-Identifier: Apache-2.0
"""How many collectives per second a job usually makes, by what its agent sees twice a second."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import pytest

from liveshift.runtime.agent.host.usual_rate import HEARTBEATS, UsualRate

BEAT = 0.5
OF_A_STEP = 40
INITIAL = 4
"""That a job makes before its first step."""


def seen(
    seconds: float, step: float, burst: float = 0.5, begins: float = 0.0, slow: Sequence[float] = ()
) -> UsualRate:
    """Of a job that makes its collectives in the last part ``burst`` of each step of ``step``
    seconds, the first of which begins after ``begins``; ``slow``: so many times as long the first
    ones take."""
    marks, now = [], begins
    for number in range(round(seconds / step) + 1):
        length = step * (slow[number] if number < len(slow) else 1)
        now += length
        marks += [now - burst * length * part / OF_A_STEP for part in reversed(range(OF_A_STEP))]
    rate = UsualRate()
    for beat in range(int(seconds / BEAT) + 1):
        rate.heartbeat(beat * BEAT, INITIAL + bisect(marks, beat * BEAT))
    return rate


@pytest.mark.parametrize("step", [0.05, 0.3, 1.4, 5, 10, 20])
@pytest.mark.parametrize("burst", [0.1, 0.5, 1.0])
def test_it_is_that_of_its_steps(step: float, burst: float) -> None:
    assert seen(60, step, burst).usual() == pytest.approx(OF_A_STEP / step, rel=0.07)


def test_the_time_in_which_a_job_begins_does_not_count() -> None:
    usual = OF_A_STEP / 1.4
    assert seen(26, 1.4, begins=8).usual() == pytest.approx(usual, rel=0.06)
    assert seen(40, 1.4, begins=8, slow=[2.7, 1.5]).usual() == pytest.approx(usual, rel=0.06)


def test_nor_does_a_time_in_which_it_stood() -> None:
    usual = OF_A_STEP / 1.4
    assert seen(40, 1.4, slow=[1] * 9 + [8]).usual() == pytest.approx(usual, rel=0.06)
    assert seen(30, 1.4, slow=[5]).usual() == pytest.approx(usual, rel=0.06)


def test_nothing_is_told_of_a_job_without_collectives_or_before_one_can_say() -> None:
    rate = UsualRate()
    assert rate.usual() == rate.now == 0.0
    for beat in range(2 * HEARTBEATS):
        rate.heartbeat(beat * BEAT, 0)
        assert rate.usual() == 0.0
    for beat, usual in enumerate([0.0, 0.0, 0.0, 0.0, 20.0]):
        rate.heartbeat((2 * HEARTBEATS + beat) * BEAT, 10 * (1 + beat))
        assert rate.now == 20.0
        assert rate.usual() == usual


def test_a_job_that_has_become_slower_is_not_held_to_what_it_was() -> None:
    rate = UsualRate()
    for beat in range(HEARTBEATS):
        rate.heartbeat(beat * BEAT, 1 + 10 * beat)
    assert rate.usual() == 20.0
    for beat in range(HEARTBEATS):
        rate.heartbeat((HEARTBEATS + beat) * BEAT, 10 * HEARTBEATS + 5 * beat)
    assert rate.usual() == 10.0


def test_a_process_that_ends_takes_its_count_along() -> None:
    rate = UsualRate()
    for beat in range(HEARTBEATS):
        rate.heartbeat(beat * BEAT, 1000 - 5 * beat)
    assert rate.now == rate.usual() == 0.0
