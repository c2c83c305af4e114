# SPDX-License-Identifier: Apache-2.0
"""A job's own deadlines, and what a move may still try while the job stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_files import SMALL, quick
from hypothesis import given
from hypothesis import strategies as st

from liveshift.errors import StepFailed, WrongUsage
from liveshift.runtime.config.cluster import Cluster, parse
from liveshift.runtime.config.timeouts import TCP_GIVES_UP_S, Timeouts
from liveshift.runtime.messages import Rounds
from liveshift.runtime.model.deadlines import FreezeBudget, check_freeze, for_job


def cluster(**timeouts: float) -> Cluster:
    return replace(parse(SMALL).cluster, timeouts=Timeouts(**timeouts))


def test_a_job_that_says_nothing_has_the_clusters() -> None:
    made = cluster(freeze=100)
    assert for_job(made, 0) is made.timeouts
    assert for_job(made, 0.0) is made.timeouts


def test_a_job_with_another_timeout_is_moved_within_that() -> None:
    made = cluster()
    short, long = for_job(made, 200), for_job(made, 1800)
    assert (short.standstill, short.freeze, short.restore) == (100, 40, 40)
    assert (long.standstill, long.freeze, long.restore) == (600, 240, 240)
    assert short.suspicion == long.suspicion == made.timeouts.suspicion == 5


def test_a_timeout_that_is_too_short_is_refused_with_the_numbers() -> None:
    with pytest.raises(WrongUsage) as caught:
        for_job(cluster(), 60)
    assert caught.value.message == (
        "a collective timeout of 60 s is too short to move the job within it: freeze 12 (2/5 of"
        " standstill) + restore 12 (2/5 of standstill) + 3 × suspicion 5 (the cluster's) = 39 must"
        " fit into standstill 30 (collective / 2, at most 600), since both answers and the commit"
        " between them may each be late by one suspicion"
    )
    assert caught.value.hint is not None
    assert "at least 150 s" in caught.value.hint
    assert for_job(cluster(), 150).standstill == 75


def test_what_the_cluster_gives_stays_given_and_counts() -> None:
    made = cluster(freeze=100)
    assert for_job(made, 400).freeze == 100
    with pytest.raises(WrongUsage, match=r"freeze 100 \(the cluster's\) \+ restore 40") as caught:
        for_job(made, 200)
    assert caught.value.hint is not None
    least = float(caught.value.hint.split("at least ")[1].split()[0])
    assert for_job(made, least).standstill >= 100
    with pytest.raises(WrongUsage, match=r"must fit into collective 300 \(the job's\)"):
        for_job(cluster(standstill=300), 300)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9, 0.001])
def test_no_span_of_time_is_refused(seconds: float) -> None:
    with pytest.raises(WrongUsage, match=r"expected a number of seconds from 0\.01"):
        for_job(cluster(), seconds)


def test_the_downtime_runs_out() -> None:
    still = FreezeBudget(Timeouts(), began=1000.0)
    assert still.left(1000.0) == 300
    assert still.left(1299.0) == 1
    assert still.left(1301.0) == -1


def test_a_move_that_is_on_time_has_all_that_the_timeouts_grant() -> None:
    t = Timeouts()
    still = FreezeBudget(t, began=0.0)
    assert still.for_freeze(0.0) == t.freeze
    latest = t.answer(t.freeze) + t.suspicion  # the answer is late, and the commit too
    assert still.for_restore(latest) == t.restore


def test_a_freeze_that_begins_late_leaves_time_for_a_full_restore() -> None:
    t = Timeouts()
    still = FreezeBudget(t, began=0.0)
    assert still.for_freeze(45.0) == t.freeze  # what the timeouts leave over
    assert still.for_freeze(60.0) == t.freeze - 15
    assert still.for_freeze(300.0) == 0


def test_restores_share_what_is_left() -> None:
    t = Timeouts()
    still = FreezeBudget(t, began=0.0)
    assert still.for_restore(100.0) == t.restore == 120
    assert still.for_restore(100.0, attempts=2) == 100 - t.suspicion
    assert still.for_restore(200.0) == 100 - t.suspicion
    assert still.for_restore(296.0) == 0
    assert still.for_restore(400.0) == 0


def test_no_restore_is_begun_that_could_not_be_told_from_a_lost_host() -> None:
    t = Timeouts()
    still = FreezeBudget(t, began=0.0)
    assert still.allows_retry(0.0)
    assert still.allows_retry(300 - 3 * t.suspicion)
    assert not still.allows_retry(300 - 3 * t.suspicion + 0.1)
    assert not still.allows_retry(1e6)


def test_an_image_is_passed_on_only_with_time_for_its_restore() -> None:
    t = Timeouts()
    still = FreezeBudget(t, began=0.0)
    assert still.for_passing_on(0.0) == t.freeze == 120
    assert still.for_passing_on(200.0) == 50 - t.suspicion
    late = 300 - 6 * t.suspicion
    assert still.allows_passing_on(late)
    assert still.allows_retry(late + t.answer(still.for_passing_on(late)))
    assert not still.allows_passing_on(late + 0.1)
    assert still.for_passing_on(400.0) == 0


@given(st.floats(30, 86400), st.floats(0, 1), st.integers(1, 5))
@quick
def test_whatever_is_handed_out_ends_in_time(collective: float, part: float, attempts: int) -> None:
    """Freezing, then restoring again and again for as long as that is allowed, every answer as
    late as can be: the undoing begins before the downtime is over."""
    t = Timeouts(collective=collective)
    still = FreezeBudget(t, began=0.0)
    now = t.standstill * part / 10
    now += t.answer(still.for_freeze(now)) + t.suspicion  # … and the commit
    assert still.left(now) >= t.restore + t.suspicion - 1e-6
    while still.allows_retry(now):
        limit = still.for_restore(now, attempts)
        assert 0 <= limit <= t.restore
        if limit == 0:
            break  # so many attempts do not fit
        now += t.answer(limit)
        if still.allows_passing_on(now):
            now += t.answer(still.for_passing_on(now))
        assert now <= t.standstill + 1e-6
    undone_by = min(collective, TCP_GIVES_UP_S)  # then the ranks give up, or their kernels' TCP
    assert undone_by - t.standstill >= 4 * t.suspicion - 1e-6


def test_what_would_have_to_be_undone_at_its_deadline_is_not_begun() -> None:
    timeouts = cluster().timeouts
    rounds = Rounds(3, 90 * 10**9, 40 * 10**9, 0, 1e8, best=118e6)
    check_freeze(timeouts, rounds, timeouts.freeze)
    with pytest.raises(StepFailed) as caught:
        check_freeze(timeouts, rounds, 339.0)
    assert caught.value.message == (
        "pre-copy: after 3 rounds the job would be frozen for 339 s while the rest of its"
        " memory is sent, at 118 MB/s; a freeze may take 120 s (timeouts.freeze). It was not"
        " stopped"
    )
    assert caught.value.hint is not None
    assert "timeouts.precopy" in caught.value.hint
