# SPDX-License-Identifier: Apache-2.0
"""A pre-copy gives way to a job that it slows down too much, and takes what the job can spare."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from liveshift.runtime.pace import FIRST_DUTY, LEAST_DUTY, Pace

BATCH_S = 0.002


class Job:
    """A job of 100 collectives per second that ``harm`` slows down while somebody reads: its rate
    falls by that share of the time in which is read."""

    def __init__(self, harm: float) -> None:
        self.now = 0.0
        self.harm = harm
        self.done = 0.0

    def read(self, seconds: float) -> None:
        self.now += seconds
        self.done += 100 * seconds * (1 - self.harm)

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.done += 100 * seconds

    def pace(self, usual: float = 100.0, share: float = 0.2) -> Pace:
        return Pace(lambda: int(self.done), usual, share, lambda: self.now, self.rest)


def play(job: Job, pace: Pace, seconds: float) -> float:
    """Read for so long; returns the share of its speed that the job has lost in the second half."""
    half: tuple[float, float] | None = None
    while job.now < seconds:
        job.read(BATCH_S)
        pace.spent(4 << 20)
        if half is None and job.now > seconds / 2:
            half = (job.now, job.done)
    assert half is not None
    return 1 - (job.done - half[1]) / (job.now - half[0]) / 100


@pytest.mark.parametrize("harm", [0.3, 0.6, 0.9])
def test_a_job_that_suffers_keeps_its_share(harm: float) -> None:
    job = Job(harm)
    pace = job.pace()
    assert play(job, pace, 60) <= 0.23
    assert LEAST_DUTY <= pace.duty < 1


def test_a_job_that_does_not_notice_is_read_without_a_pause() -> None:
    job = Job(0.05)
    pace = job.pace()
    assert play(job, pace, 60) < 0.06
    assert pace.duty == 1.0


def test_reading_never_stops_altogether() -> None:
    job = Job(1.0)
    pace = job.pace(share=0.001)
    play(job, pace, 60)
    assert pace.duty == LEAST_DUTY


@pytest.mark.parametrize("share", [0.05, 0.2, 0.9])
def test_without_collectives_no_more_time_is_taken_than_may_be_lost(share: float) -> None:
    """Of a job that stands while somebody reads: its one core is taken off it."""
    job = Job(1.0)
    pace = job.pace(usual=0, share=share)
    assert play(job, pace, 20) == pytest.approx(min(share, FIRST_DUTY), rel=0.02)
    assert pace.duty == min(share, FIRST_DUTY)
    assert pace.slow_down is None
    assert pace.lost() is None


def test_every_thread_rests_for_what_it_has_read_itself() -> None:
    """Whatever others do meanwhile: with many of them somebody has always just rested."""
    job = Job(0.5)
    rests: dict[str, list[float]] = {"one": [], "other": []}
    pace = Pace(
        lambda: 0, 0, 0.2, lambda: job.now,
        lambda seconds: rests[threading.current_thread().name].append(seconds),
    )  # fmt: skip
    with (
        ThreadPoolExecutor(1, initializer=named, initargs=("one",)) as one,
        ThreadPoolExecutor(1, initializer=named, initargs=("other",)) as other,
    ):
        job.now = 0.003
        other.submit(pace.spent, 0).result()
        job.now = 0.004
        one.submit(pace.spent, 0).result()
        job.now = 0.005
        other.submit(pace.spent, 0).result()
    assert rests["one"] == [pytest.approx(4 * 0.004)]
    assert rests["other"] == [pytest.approx(4 * 0.003), pytest.approx(4 * 0.002)]


def test_what_goes_between_two_rounds_is_no_work() -> None:
    job = Job(0.5)
    rests: list[float] = []
    pace = Pace(lambda: 0, 0, 0.2, lambda: job.now, rests.append)
    job.now = 0.001
    pace.spent(0)
    job.now = 9.0
    pace.begin()
    job.now = 9.002
    pace.spent(0)
    assert rests == [pytest.approx(4 * 0.001), pytest.approx(4 * 0.002)]


def named(name: str) -> None:
    threading.current_thread().name = name


@pytest.mark.parametrize("read", [lambda job: job.read(30), lambda job: job.rest(30)])
def test_what_was_lost_is_told(read: Callable[[Job], None]) -> None:
    job = Job(0.4)
    pace = job.pace()
    read(job)
    lost = pace.lost()
    assert lost is not None
    assert lost == pytest.approx(1 - job.done / 3000, abs=0.01)
