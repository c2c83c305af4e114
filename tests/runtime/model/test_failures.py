# SPDX-License-Identifier: Apache-2.0
"""How often hosts fail, against values that were computed by hand."""

from __future__ import annotations

import pytest

from liveshift.runtime.model.failures import (
    ASSUMED_HOURS,
    MOST_HOURS,
    NOTHING_SEEN,
    FailuresSeen,
    mean_time_to_failure,
    source,
)
from liveshift.runtime.model.interval import SnapshotCost, interval

HOUR = 3600.0


def every(seen: FailuresSeen) -> float:
    """The interval of a job on two hosts whose snapshots cost half a second."""
    return interval(SnapshotCost(0.5), mean_time_to_failure(2, 0, None, seen), 0.5, 1.0)


def test_the_mean_time_to_failure_is_that_of_the_jobs_gpus_or_hosts() -> None:
    assert mean_time_to_failure(128, 1024, None) == pytest.approx(7.9 * HOUR)
    assert mean_time_to_failure(2, 16, None) == pytest.approx(505.6 * HOUR)
    # A host without GPUs counts as one with eight: 7.9 h * 1024 / (8 * 2).
    assert mean_time_to_failure(2, 0, None) == pytest.approx(505.6 * HOUR)


def test_what_is_given_wins() -> None:
    often = FailuresSeen(100, 10.0)
    for seen in (NOTHING_SEEN, often):
        assert mean_time_to_failure(2, 0, 16 * HOUR, seen) == 8 * HOUR
        assert mean_time_to_failure(2, 16, 16 * HOUR, seen) == 8 * HOUR
        assert source(16 * HOUR, seen) == "given"


def test_with_nothing_seen_it_is_the_assumed_rate() -> None:
    assert pytest.approx(1011.2) == ASSUMED_HOURS  # 7.9 * 1024 / 8
    assert NOTHING_SEEN.times_assumed == 1.0
    assert source(None, NOTHING_SEEN) == "assumed"
    assert source(None, FailuresSeen(0, 0.5)) == "assumed"


@pytest.mark.parametrize(
    ("losses", "hours", "times"),
    [
        (1, 0.0, 2.0),  # one loss at once does not change it beyond measure
        (1, 1011.2, 1.0),  # as often as assumed
        (0, 1011.2, 0.5),
        (9, 1011.2, 5.0),
        (99, 1011.2, 50.0),
    ],
)
def test_the_rate_follows_what_was_seen(losses: int, hours: float, times: float) -> None:
    seen = NOTHING_SEEN.after(losses, hours)
    assert seen.times_assumed == pytest.approx(times)
    assert mean_time_to_failure(2, 0, None, seen) == pytest.approx(505.6 * HOUR / times)
    assert mean_time_to_failure(2, 16, None, seen) == pytest.approx(505.6 * HOUR / times)


def test_many_losses_make_the_interval_shorter() -> None:
    assert every(FailuresSeen(99, 1011.2)) == pytest.approx(every(NOTHING_SEEN) / 50**0.5)


def test_a_long_quiet_time_makes_the_interval_longer_up_to_a_bound() -> None:
    seen, before = NOTHING_SEEN, every(NOTHING_SEEN)
    for _ in range(10):
        seen = seen.after(0, 1000.0)
        assert every(seen) > before
        before = every(seen)
    for _ in range(1000):
        seen = seen.after(0, 1000.0)
        assert seen.hours <= MOST_HOURS
        assert every(seen) <= every(NOTHING_SEEN) * 11**0.5 + 0.001
    assert NOTHING_SEEN.after(0, 1e9).hours <= MOST_HOURS, "also of a cluster of thousands"


def test_a_cluster_that_has_become_worse_is_believed_before_long() -> None:
    seen = NOTHING_SEEN
    for _ in range(100):
        seen = seen.after(0, 1000.0)
    for _ in range(20):
        seen = seen.after(10, 1000.0)  # ten times as often as assumed
    assert seen.times_assumed == pytest.approx(10.0, rel=0.3)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (FailuresSeen(0, 512.4), "learnt from 0 losses in 512 host-hours"),
        (FailuresSeen(1, 0.2), "learnt from 1 loss in 0 host-hours"),
        (FailuresSeen(2, 512.0), "learnt from 2 losses in 512 host-hours"),
        (FailuresSeen(2.5, 512.0), "learnt from 2.50 losses in 512 host-hours"),
    ],
)
def test_people_see_what_it_was_learnt_from(seen: FailuresSeen, text: str) -> None:
    assert source(None, seen) == text
