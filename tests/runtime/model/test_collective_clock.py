# SPDX-License-Identifier: Apache-2.0
"""The coordinator by itself; with real gates below it: test_gate_simulation.py."""

from __future__ import annotations

import time

import pytest

from liveshift.runtime.model.collective_clock import ClockReport, CollectiveClock


def told(clock: CollectiveClock, numbers: dict[str, dict[int, int]]) -> None:
    for host, begun in numbers.items():
        clock.add_report(host, ClockReport(0, begun, False))


def reached(clock: CollectiveClock, *hosts: str) -> None:
    for host in hosts:
        clock.add_report(host, ClockReport(clock.aim(host).version, {}, True))


def test_targets_are_the_highest_begun_anywhere_and_a_host_is_given_its_own() -> None:
    clock = CollectiveClock(["a", "b"])
    clock.add_report("a", ClockReport(0, {1: 5, 2: 7}, False))
    assert (clock.version, clock.due(), clock.converged) == (0, [], False)
    clock.add_report("b", ClockReport(0, {1: 6, 3: 0}, False))
    assert clock.due() == ["a", "b"]
    assert clock.due() == []
    assert clock.aim("a").targets == {1: 6, 2: 7}
    assert clock.aim("b").targets == {1: 6, 3: 0}
    assert clock.behind == ["a", "b"]
    reached(clock, "a")
    assert (clock.behind, clock.converged) == (["b"], False)
    reached(clock, "b")
    assert clock.converged


def test_a_raise_is_the_affair_of_the_clocks_hosts() -> None:
    clock = CollectiveClock(["a", "b", "c"])
    told(clock, {"a": {1: 5}, "b": {1: 5, 2: 1}, "c": {2: 1}})
    clock.due()
    reached(clock, "a", "c")
    clock.add_report("b", ClockReport(1, {2: 3}, False))
    assert clock.due() == ["b", "c"]
    assert clock.aim("c").targets == {2: 3}
    assert clock.aim("a").version == 1
    assert clock.behind == ["b", "c"]
    reached(clock, "b", "c")
    assert clock.converged


def test_raises_that_came_together_are_one_aim() -> None:
    clock = CollectiveClock(["a", "b"])
    told(clock, {"a": {1: 5, 2: 1}, "b": {1: 5, 2: 1}})
    clock.due()
    clock.add_report("a", ClockReport(1, {2: 3}, False))
    clock.add_report("b", ClockReport(1, {1: 6}, False))
    clock.add_report("b", ClockReport(1, {2: 2}, False))
    assert clock.due() == ["a", "b"]
    assert clock.aim("b").targets == {1: 6, 2: 3}


def test_a_report_of_older_targets_is_no_convergence() -> None:
    clock = CollectiveClock(["a", "b"])
    told(clock, {"a": {1: 5}, "b": {1: 5}})
    reached(clock, "b")
    clock.add_report("a", ClockReport(1, {1: 6}, False))
    clock.add_report("b", ClockReport(1, {}, True))
    assert clock.behind == ["a", "b"]


def test_a_raise_after_convergence_undoes_it() -> None:
    clock = CollectiveClock(["a", "b"])
    told(clock, {"a": {1: 5}, "b": {1: 5}})
    reached(clock, "a", "b")
    before = clock.converged
    assert before
    clock.add_report("b", ClockReport(1, {1: 6}, False))
    assert not clock.converged
    assert clock.due() == ["a", "b"]


def test_a_clock_that_appears_late_gets_the_target_that_the_others_have() -> None:
    clock = CollectiveClock(["a", "b", "c"])
    told(clock, {"a": {1: 5}, "b": {}, "c": {}})
    clock.due()
    reached(clock, "b", "c")
    clock.add_report("b", ClockReport(1, {1: 0}, True))
    assert clock.aim("b").targets == {1: 5}
    assert "b" in clock.behind
    assert "b" in clock.due()
    # One that nobody has used changes nothing.
    clock.add_report("c", ClockReport(1, {9: 0}, True))
    assert "c" not in clock.behind


def test_what_a_host_says_of_an_attempt_before_is_nothing() -> None:
    clock = CollectiveClock(["a"])
    clock.add_report("a", ClockReport(3, {1: 5}, True))
    assert clock.version == 0, "its first report is still to come"
    with pytest.raises(KeyError):
        clock.add_report("b", ClockReport(0, {}, False))


def test_2048_hosts_are_no_burden() -> None:
    """Linear: 16,384 ranks are reports of 2,048 hosts; the bound is 20 times what was measured."""
    hosts = [f"h{i}" for i in range(2048)]
    begun = {h: {1: 100} | {i * 40 + k + 10: k for k in range(39)} for i, h in enumerate(hosts)}
    began = time.process_time()
    clock = CollectiveClock(hosts)
    told(clock, begun)
    for host in clock.due():
        clock.add_report(host, ClockReport(clock.aim(host).version, {}, True))
    assert clock.converged
    assert time.process_time() - began < 1


def test_the_other_end_of_a_pair_is_sought_among_its_communicators_hosts() -> None:
    """The pair's clock is made with its first operation: only one end knows of it at first."""
    world, pair, of = 7, 8, (7, 0, 1)
    clock = CollectiveClock(["a", "b", "c"])
    clock.add_report("a", ClockReport(0, {world: 5, pair: 1}, False, {pair: of}))
    clock.add_report("b", ClockReport(0, {world: 5}, False))
    clock.add_report("c", ClockReport(0, {}, False))
    clock.due()
    assert (clock.aim("b").targets, clock.aim("b").pairs) == ({world: 5, pair: 1}, {pair: of})
    assert clock.aim("c").targets == {}
    reached(clock, "a", "c")
    # It is made there; and what is raised from then on concerns both.
    clock.add_report("b", ClockReport(1, {pair: 0}, False, {pair: of}))
    assert clock.due() == []
    reached(clock, "b")
    assert clock.converged
    clock.add_report("a", ClockReport(1, {pair: 2}, False))
    assert clock.due() == ["a", "b"]
    assert clock.aim("b").pairs == {}


def test_a_host_that_makes_the_communicator_later_may_have_the_other_end() -> None:
    world, pair, of = 7, 8, (7, 0, 1)
    clock = CollectiveClock(["a", "b"])
    clock.add_report("a", ClockReport(0, {world: 0, pair: 1}, False, {pair: of}))
    clock.add_report("b", ClockReport(0, {}, False))
    clock.due()
    clock.add_report("b", ClockReport(1, {world: 0}, True))
    assert clock.due() == ["a", "b"]
    assert clock.aim("b").pairs == {pair: of}
    assert "b" in clock.behind
