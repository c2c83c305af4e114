# SPDX-License-Identifier: Apache-2.0
"""A pre-copy gives way to a job that it slows down too much, and takes what the job can spare."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from paced_job import BATCH, READS, Job, Steady, play

from liveshift.runtime.agent.departure.throttle import AIM, BURST_S, LEAST, UNSEEN_MOST, Throttle
from liveshift.runtime.agent.host.reading_cost import BYTES_PER_CPU_SECOND, DEAREST, IDLE_S, LOOK


@pytest.mark.parametrize("harm", [0.3, 1.0, 4.0])
def test_a_job_that_suffers_keeps_its_share_and_no_more(harm: float) -> None:
    job = Job(harm)
    pace = job.pace()
    lost, rate = play(job, pace, 60)
    assert lost <= 0.2
    assert rate == pytest.approx(AIM * 0.2 / harm * 1e9, rel=0.2)


BURSTS = [(1.0, 0.5), (2.0, 1.0), (5.0, 2.0), (2.0, 0.1), (30.0, 5.0)]
"""Seconds of a step, and of those in which it makes its collectives."""


@pytest.mark.parametrize(("step", "burst"), BURSTS)
def test_a_job_that_makes_its_collectives_in_bursts_is_not_taken_for_one_that_suffers(
    step: float, burst: float
) -> None:
    job = Job(0.02, step, burst)
    lost, rate = play(job, job.pace(cpus=64), 30 * step + 120)
    assert lost < 0.07
    assert rate > 1e9


@pytest.mark.parametrize(("step", "burst"), BURSTS)
def test_nor_does_it_lose_more_than_others(step: float, burst: float) -> None:
    job = Job(1.0, step, burst)
    lost, rate = play(job, job.pace(), 60 * step + 120)
    assert lost <= 0.25
    assert rate > 0.03e9


def test_a_pause_is_made_up_for() -> None:
    """A checkpoint, an evaluation: nobody's fault, and over some time."""
    job = Job(0.02)
    pace = job.pace()
    play(job, pace, 20)
    before = job.worked
    while job.now < 50:
        job.read()
        pace.account(BATCH)
        job.worked = before
    play(job, pace, 200)
    _, rate = play(job, pace, 200)
    assert rate > 1e9


@pytest.mark.parametrize("harm", [0.3, 0.6, 1.0])
def test_a_short_pre_copy_takes_no_more_than_a_long_one(harm: float) -> None:
    """What is not known yet is not tried out on the job."""
    job = Job(harm)
    pace = job.pace()
    while job.now < 3:
        job.read()
        pace.account(BATCH)
    assert (pace.lost() or 0) <= 0.2


@pytest.mark.parametrize("harm", [0.3, 0.6])
def test_a_first_guess_that_was_wrong_is_mended_soon(harm: float) -> None:
    """On a machine of many cores, of which the job uses one: the guess is too high for it."""
    job = Job(harm)
    pace = job.pace(cpus=16)
    play(job, pace, 5)
    lost, _ = play(job, pace, 10)
    assert lost <= 0.2


def test_a_job_that_does_not_notice_is_read_without_a_pause() -> None:
    job = Job(0.01)
    lost, rate = play(job, job.pace(), 60)
    assert lost < 0.04
    assert rate == pytest.approx(READS, rel=0.05)


def test_a_rate_that_is_not_reached_does_not_grow() -> None:
    """A slow link bounds it: what is allowed must not be far above once the link is faster."""
    job = Job(0.01)
    pace = job.pace()
    for _ in range(200):
        job.read()
        pace.account(BATCH)
        job.rest(0.1)
    assert pace.rate == pytest.approx(0.1 * 2 * BYTES_PER_CPU_SECOND)


def test_a_job_that_stands_is_not_waited_for_without_end() -> None:
    job = Job(0.02)
    pace = job.pace()
    play(job, pace, 20)
    before, rate = job.worked, pace.rate
    while job.now < 60:
        job.read()
        pace.account(BATCH)
        job.worked = before
    assert pace.rate < rate


def test_reading_never_stops_altogether() -> None:
    job = Job(25.0)
    pace = job.pace(share=0.01)
    _, rate = play(job, pace, 600)
    assert pace.rate == LEAST
    assert rate == pytest.approx(LEAST, rel=0.05)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.9])
def test_without_collectives_half_of_what_may_be_lost_is_read_by_all_cores(share: float) -> None:
    job = Job(1.0)
    pace = job.pace(usual=0, share=share)
    _, rate = play(job, pace, 20)
    assert rate == pytest.approx(share * BYTES_PER_CPU_SECOND, rel=0.05)
    assert pace.slow_down is None
    assert pace.lost() is None


DEAR = [0.3, 1.0, 2.5, 4.0, 7.0]
"""CPU seconds a GB: pages that only are compared, up to those that zstd makes smaller."""


@pytest.mark.parametrize("dear", DEAR)
def test_without_collectives_half_of_what_may_be_lost_is_cpu_time_of_reading(dear: float) -> None:
    job = Job(1.0, dear=dear)
    pace = job.pace(usual=0)
    _, rate = play(job, pace, 30)
    assert rate == pytest.approx(0.1 * 2 / dear * 1e9, rel=0.05)
    before, since = job.used, job.now
    play(job, pace, 30)
    assert (job.used - before) / (job.now - since) == pytest.approx(0.1 * 2, rel=0.05)


@pytest.mark.parametrize("dear", DEAR)
def test_a_first_guess_of_the_cost_is_mended_within_a_quarter_of_a_gigabyte(dear: float) -> None:
    job = Job(1.0, dear=dear)
    pace = job.pace(usual=0)
    while job.read_bytes < 250e6:
        job.read()
        pace.account(BATCH)
    assert pace.rate == pytest.approx(0.1 * 2 / dear * 1e9, rel=0.05)
    assert job.used < 1.35 * 0.1 * 2 * job.now + 0.1


def test_a_cost_that_varies_is_smoothed() -> None:
    """Of pages that were never written zstd makes nothing, others take it their time."""
    job = Job(1.0)
    pace = job.pace(usual=0)
    rates = []
    for n in range(400):
        job.dear = (0.5, 0.5, 5.5, 5.5)[n // 2 % 4]
        job.read()
        pace.account(BATCH)
        rates.append(pace.rate)
    assert all(rate == pytest.approx(0.1 * 2 / 3.0 * 1e9, rel=0.4) for rate in rates[-200:])
    assert sum(rates[-200:]) / 200 == pytest.approx(0.1 * 2 / 3.0 * 1e9, rel=0.1)


@pytest.mark.parametrize(("dear", "rate"), [(0.0, UNSEEN_MOST), (500.0, LEAST)])
def test_whatever_it_costs_the_rate_is_sane(dear: float, rate: float) -> None:
    job = Job(1.0, dear=dear)
    pace = job.pace(usual=0)
    play(job, pace, 30)
    assert pace.rate == rate
    assert job.cost.per_byte <= DEAREST


def test_cpu_time_of_a_pause_was_not_for_reading() -> None:
    """Hours of heartbeats, a freeze, the move of another."""
    job = Job(1.0)
    pace = job.pace(usual=0)
    play(job, pace, 10)
    rate = pace.rate
    job.now += IDLE_S
    job.used += 100.0
    pace.account(LOOK)
    assert pace.rate == rate


def test_what_the_agent_does_beside_is_soon_forgotten() -> None:
    job = Job(1.0)
    pace = job.pace(usual=0)
    play(job, pace, 10)
    rate = pace.rate
    job.used += 30.0
    slowest = rate
    after = job.read_bytes + 256e6
    while job.read_bytes < after:
        job.read()
        pace.account(BATCH)
        slowest = min(slowest, pace.rate)
    assert rate / 6 < slowest < rate / 2
    assert pace.rate == pytest.approx(rate, rel=0.05)


def test_a_pre_copy_begins_with_what_the_one_before_found() -> None:
    job = Job(1.0, dear=4.0)
    play(job, job.pace(usual=0), 30)
    job.rest(3600)
    assert job.pace(usual=0).rate == pytest.approx(0.1 * 2 / 4.0 * 1e9, rel=0.01)


def read_together(job: Job, paces: list[Throttle], seconds: float) -> list[int]:
    """Each of them reads in a thread of its own, as it may; how much each has read."""
    wakes, read = [job.now] * len(paces), [0] * len(paces)
    until = job.now + seconds
    while min(wakes) < until:
        n = wakes.index(min(wakes))
        job.now = wakes[n] + BATCH / READS
        job.used += job.dear * BATCH / 1e9
        job.rests.clear()
        paces[n].account(BATCH)
        wakes[n] = job.now + sum(job.rests)
        read[n] += BATCH
    job.now = until
    return read


def test_several_at_once_share_the_time_of_the_cores() -> None:
    job = Job(1.0, dear=2.0)
    paces = [
        Throttle(lambda: 0, 0, share, lambda: job.now, job.rests.append, 2, job.cost)
        for share in (0.2, 0.2, 0.4)
    ]
    read_together(job, paces, 20)
    assert job.cost.per_byte == pytest.approx(2e-9, rel=0.01)
    read = read_together(job, paces, 20)
    wanted = [share / 2 * 2 / 3 / 2.0 * 1e9 * 20 for share in (0.2, 0.2, 0.4)]
    assert read == pytest.approx(wanted, rel=0.05)
    (alone,) = read_together(job, paces[:1], 20)
    assert alone == pytest.approx(wanted[0] * 3, rel=0.25)


def test_until_a_job_says_what_it_loses_reading_is_held_by_what_it_costs() -> None:
    job = Job(1.0, step=60.0, burst=0.1, dear=4.0)
    pace = job.pace()
    _, rate = play(job, pace, 30)
    assert pace.slow_down is None
    assert rate == pytest.approx(0.1 * 2 / 4.0 * 1e9, rel=0.05)


def test_before_it_has_said_so_no_more_is_tried_out_on_it() -> None:
    job = Job(1.0, step=60.0, burst=0.1, dear=0.2)
    for _ in range(2):
        pace = job.pace()
        _, rate = play(job, pace, 30)
        assert pace.slow_down is None
        assert rate == pytest.approx(0.1 * 2 * BYTES_PER_CPU_SECOND, rel=0.05)


@pytest.mark.parametrize("dear", DEAR)
@pytest.mark.parametrize("harm", [0.3, 1.0, 4.0])
def test_a_job_that_says_it_is_believed_whatever_it_costs(harm: float, dear: float) -> None:
    job = Job(harm, dear=dear)
    pace = job.pace()
    lost, rate = play(job, pace, 60)
    assert lost <= 0.2
    assert rate == pytest.approx(AIM * 0.2 / harm * 1e9, rel=0.2)


@pytest.mark.parametrize("harm", [0.0, 0.3, 4.0])
def test_of_one_that_may_lose_more_than_it_says_no_more_is_read_than_can_be_afforded(
    harm: float,
) -> None:
    """A GB a CPU second, so 0.2 of it; less if even that costs the job too much."""
    job = Job(harm)
    lost, rate = play(job, job.pace(sees_all=False), 60)
    assert lost <= 0.2
    wanted = min(0.1 * 2 * 1e9, AIM * 0.2 / max(harm, 1e-3) * 1e9)
    assert rate == pytest.approx(wanted, rel=0.2)


def test_threads_read_no_more_than_one_would() -> None:
    job = Job(1.0)
    rests: list[float] = []
    pace = Throttle(lambda: 0, 0, 0.2, lambda: job.now, rests.append, 2, Steady())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pace.account, [BATCH] * 20))
    assert sum(rests) == pytest.approx(sum(n * BATCH / pace.rate for n in range(1, 21)))


def test_what_was_not_read_between_rounds_is_not_made_up_for() -> None:
    job = Job(1.0)
    rests: list[float] = []
    pace = Throttle(lambda: 0, 0, 0.2, lambda: job.now, rests.append, 2, Steady())
    pace.account(10 * BATCH)
    rests.clear()
    job.now = 60.0
    pace.account(100 * BATCH)
    assert sum(rests) == pytest.approx(100 * BATCH / pace.rate - BURST_S)


@pytest.mark.parametrize(
    "use", [lambda job: [job.read() for _ in range(20_000)], lambda job: job.rest(30)]
)
def test_what_was_lost_is_told(use: Callable[[Job], None]) -> None:
    job = Job(0.1)
    pace = job.pace()
    pace.account(0)
    use(job)
    lost = pace.lost()
    assert lost == pytest.approx(0.3 if job.read_bytes else 0.0, abs=0.01)


def test_what_was_lost_is_not_told_at_once() -> None:
    assert Job(0.4).pace().lost() is None


def test_a_job_that_has_ended_has_lost_all_and_not_more() -> None:
    job = Job(0.4)
    job.worked = 10.0
    pace = job.pace()
    pace.account(0)
    job.rest(2)
    job.worked = 0.0
    assert pace.lost() == 1.0
    job.rest(4)
    pace.account(BATCH)
    assert pace.rate >= LEAST


@pytest.mark.parametrize("harm", [0.05, 0.1, 0.2])
def test_without_a_cap_it_is_read_as_fast_as_can_be_and_what_that_costs_is_seen(
    harm: float,
) -> None:
    job = Job(harm)
    pace = job.pace(share=None)
    _, rate = play(job, pace, 20)
    assert rate == pytest.approx(READS, rel=0.01)
    assert pace.per_byte == pytest.approx(harm * 1e-9, rel=0.1)


def test_without_a_cap_a_speed_that_was_chosen_is_kept() -> None:
    job = Job(0.5)
    pace = job.pace(share=None)
    pace.set_limit(0.3e9)
    lost, rate = play(job, pace, 20)
    assert rate == pytest.approx(0.3e9, rel=0.02)
    assert lost == pytest.approx(0.15, rel=0.1)
    assert pace.per_byte == pytest.approx(0.5e-9, rel=0.1)


def test_a_deadline_comes_before_the_cap_and_before_the_speed_that_was_chosen() -> None:
    for share in (None, 0.05):
        job = Job(0.5)
        pace = job.pace(share=share, least=0.8e9)
        pace.set_limit(0.1e9)
        _, rate = play(job, pace, 20)
        assert rate == pytest.approx(0.8e9, rel=0.05)
