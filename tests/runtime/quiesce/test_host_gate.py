# SPDX-License-Identifier: Apache-2.0
"""A host's side of the collective clock, on pages whose processes do as they are told here.

What it does while threads run on: test_gate_simulation.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gate_pages import TID, WORLD, Process, lib
from gloo_boundaries import still
from simulated_gate import ARMED, CLOSED, GO, PARK

from liveshift.interposer import layout
from liveshift.interposer.layout import WantedState
from liveshift.interposer.orders import OrderedPage
from liveshift.interposer.page import PageError
from liveshift.runtime.quiesce import services
from liveshift.runtime.quiesce.host_gate import HostGate, page_problem
from liveshift.runtime.quiesce.thread_places import places

__all__ = ["lib"]


@pytest.fixture
def ranks(lib: Any, tmp_path: Path) -> Iterator[list[Process]]:
    made = [Process(lib, tmp_path, rank) for rank in range(3)]
    yield made
    for process in made:
        lib.sim_process_end(process.gate)


def at(rank: Process) -> dict[str, Any]:
    page = rank.ordered()
    order = page.order()
    page.close()
    return order


def armed(
    *ranks: Process, attempt: int = 1, alive: Callable[[OrderedPage], bool] = lambda _: True
) -> HostGate:
    gate = HostGate(attempt, 1000, 500, alive)
    for rank in ranks:
        gate.admit(rank.ordered())
    return gate


def test_a_boundary_from_arming_to_opening(ranks: list[Process]) -> None:
    first, second = ranks[:2]
    first.begin()
    first.end()
    gate = armed(first, second)
    assert first.begin() == second.begin() == ARMED
    begun = gate.announced()
    assert begun is not None
    assert (begun.version, begun.numbers, begun.pairs) == (0, {WORLD: 2}, {})
    gate.aim(1, {WORLD: 2})
    assert (first.again(), second.again()) == (GO, GO)
    assert not gate.report().reached
    first.end()
    second.end()
    assert not gate.report().reached  # another of the second is pending
    assert second.begin() == GO
    second.end()
    assert gate.report().reached
    assert first.begin() == PARK
    assert not still(gate)  # not closed yet
    gate.close()
    assert first.again() == CLOSED
    assert still(gate)
    assert [services.opened(page) for page in gate.pages] == [[], []]
    assert first.again() == GO
    gate.release()


def test_a_raise_is_told_and_an_older_aim_ignored(lib: Any, ranks: list[Process]) -> None:
    one = ranks[0]
    pair = lib.sim_clock(one.gate, one.made, 0, 1)
    one.begin(pair)
    one.end(pair)
    gate = armed(one)
    gate.announced()
    gate.aim(1, {WORLD: 0, next(i for i in ids(one) if i != WORLD): 2})
    assert one.begin() == GO  # on the way to what is pending
    assert gate.report().numbers == {WORLD: 1}
    gate.aim(2, {WORLD: 1})
    gate.aim(1, {WORLD: 7})
    one.end()
    assert gate.report().numbers == {}
    assert at(one)["version"] == 2
    gate.release()


def ids(process: Process) -> list[int]:
    page = process.ordered()
    try:
        return [clock.id for clock in page.clocks()]
    finally:
        page.close()


def test_nothing_is_told_while_a_group_is_being_begun(lib: Any, ranks: list[Process]) -> None:
    one = ranks[0]
    assert lib.sim_group_begin(one.gate)
    gate = armed(*ranks)
    assert gate.announced() is None
    lib.sim_announce(one.gate, one.clock, 1, TID)
    lib.sim_group_end(one.gate)
    begun = gate.announced()
    assert begun is not None
    assert begun.numbers == {WORLD: 1}
    gate.release()


def test_a_pair_is_told_with_its_ends_unless_both_are_here(lib: Any, ranks: list[Process]) -> None:
    one, other = ranks[:2]
    lib.sim_clock(one.gate, one.made, 0, 3)
    lib.sim_clock(one.gate, one.made, 0, 1)
    lib.sim_clock(other.gate, other.made, 0, 1)
    gate = armed(*ranks)
    begun = gate.announced()
    assert begun is not None
    assert list(begun.pairs.values()) == [(WORLD, 0, 3)]
    gate.release()


def test_a_pending_operation_on_a_clock_that_is_not_made_yet(
    lib: Any, ranks: list[Process]
) -> None:
    one, other, third = ranks
    gate = armed(*ranks)
    gate.announced()
    pair = lib.sim_clock(third.gate, third.made, 1, 0)
    clock = next(i for i in ids(third) if i != WORLD)
    lib.sim_communicator_end(third.gate, third.made)
    gate.aim(1, {WORLD: 0, clock: 1}, {clock: (WORLD, 1, 0)})
    assert pair >= 0
    assert (at(one)["missing_count"], at(other)["missing_count"], at(third)["missing_count"]) == (
        1,
        1,
        0,
    )
    assert not gate.report().reached
    pending = gate.pending_returns(lambda _: None)
    assert pending == [
        f"rank {rank} owes operation 1 of 1 on dp 1 → 0, last none (threads: not known)"
        for rank in (0, 1)
    ]
    for process in (one, other):
        made = lib.sim_clock(process.gate, process.made, 1, 0)
        assert process.begin(made) == GO
        process.end(made)
    gate.report()
    assert gate.report().reached
    gate.release()


def test_more_clocks_are_missing_than_the_page_holds(lib: Any, ranks: list[Process]) -> None:
    one, peer = ranks[:2]
    count = layout.MISSING_CLOCKS + 72
    for n in range(count):
        lib.sim_clock(peer.gate, peer.made, n + 10, 0)
    clocks = [clock for clock in ids(peer) if clock != WORLD]
    gate = armed(one)
    gate.announced()
    pairs = {clock: (WORLD, n + 10, 0) for n, clock in enumerate(clocks)}
    gate.aim(1, dict.fromkeys(clocks, 1) | {WORLD: 0}, pairs)
    assert at(one)["missing_count"] == layout.MISSING_CLOCKS
    for n in range(count):
        row = lib.sim_clock(one.gate, one.made, n + 10, 0)
        assert one.begin(row) == GO
        one.end(row)
        assert not gate.report().reached or n == count - 1  # the next ones are asked for
    assert gate.report().reached
    gate.release()


def test_a_process_that_appears_is_armed_and_given_targets(lib: Any, ranks: list[Process]) -> None:
    one, _, late = ranks
    late.begin()
    gate = armed(one)
    gate.announced()
    gate.aim(1, {WORLD: 0})
    gate.admit(late.ordered())
    assert at(late)["want"] == WantedState.ARMED
    report = gate.report()
    assert (report.numbers, report.reached) == ({WORLD: 1}, False)
    gate.aim(2, {WORLD: 1})
    assert one.begin() == GO
    one.end()
    late.end()
    assert gate.report().reached
    gate.release()


def test_one_that_appears_when_all_is_closed_opens_the_question_again(
    ranks: list[Process],
) -> None:
    one, _, late = ranks
    gate = armed(one)
    gate.announced()
    gate.aim(1, {WORLD: 0})
    gate.close()
    gate.admit(late.ordered())
    assert not still(gate)
    assert gate.report().reached
    assert gate.want is WantedState.TARGET
    gate.close()
    assert still(gate)
    assert at(late)["want"] == WantedState.CLOSED
    gate.release()


def test_a_process_that_has_ended_is_not_waited_for(ranks: list[Process]) -> None:
    dead: set[str] = set()
    gate = armed(*ranks, alive=lambda page: page.path.name not in dead)
    ranks[0].begin()
    gate.announced()
    gate.aim(1, {WORLD: 1})
    for rank in ranks[:2]:
        assert rank is ranks[0] or rank.begin() == GO
        rank.end()
    ranks[0].again()
    assert not gate.report().reached
    dead.add("1002")
    assert gate.report().reached
    assert [page.pid for page in gate.pages] == [1000, 1001]
    gate.release()


def test_a_damaged_page_costs_the_attempt_but_not_the_others(ranks: list[Process]) -> None:
    gate = armed(*ranks)
    pages = gate.pages
    os.ftruncate(pages[1].fd, 3000)
    gate.announced()
    gate.aim(1, {WORLD: 0})
    assert not gate.report().reached
    (obstacle,) = gate.obstacles()
    assert (obstacle.pid, obstacle.rank, obstacle.fatal) == (1001, 1, True)
    assert "is not a page" in obstacle.text
    assert at(ranks[2])["want"] == WantedState.TARGET
    assert [services.opened(page) for page in pages] == [[], [], []]
    assert at(ranks[0])["want"] == at(ranks[2])["want"] == WantedState.OPEN
    os.ftruncate(pages[1].fd, layout.ALLOCATIONS_AT)
    gate.release()


def test_a_page_of_another_layout_is_an_obstacle_by_name(ranks: list[Process]) -> None:
    with open(ranks[0].path, "r+b") as page:
        page.seek(layout.IDENTITY.offsets["layout"])
        page.write((99).to_bytes(4, "little"))
    with pytest.raises(PageError) as error:
        ranks[0].ordered()
    obstacle = page_problem(ranks[0].path, error.value)
    assert obstacle.fatal
    assert "layout 99" in obstacle.text


def test_what_stands_against_a_boundary_is_told(
    lib: Any, ranks: list[Process], tmp_path: Path
) -> None:
    one = ranks[0]
    nameless = Process(lib, tmp_path, 3, identity=0)
    gate = armed(*ranks, nameless)
    lib.sim_untracked_begin(one.gate)
    told = {(o.rank, o.fatal): o.text for o in gate.obstacles()}
    assert "no clock counts" in told[0, False]
    assert "do not agree on its identity" in told[3, False]
    gate.announced()
    gate.aim(1, {WORLD: 0})
    assert not gate.report().reached
    lib.sim_untracked_end(one.gate)
    # The agent is silent for its lease.
    assert one.begin() == PARK
    assert one.waiter is not None
    one.waiter.silent_ms = 1000
    assert one.again() == GO
    told = {(o.rank, o.fatal): o.text for o in gate.obstacles()}
    assert "opened by itself" in told[0, True]
    one.end()
    assert not gate.report().reached
    gate.release()
    lib.sim_process_end(nameless.gate)


def test_who_is_behind_with_what_and_where_its_threads_are(ranks: list[Process]) -> None:
    one, other = ranks[:2]
    one.begin()
    gate = armed(one, other)
    gate.announced()
    gate.aim(1, {WORLD: 1})
    here = {1000: os.getpid()}
    inside, behind = gate.pending_returns(lambda page: here.get(page.pid))
    text = f"rank 0 is inside operation 1 of 1 on dp, last {one_kind(one)} (threads: "
    assert inside.startswith(text)
    first = re.match(r"\S+ (\d+): ", inside.removeprefix(text))
    assert first is not None, inside
    assert first[1] in os.listdir("/proc/self/task"), "a thread of this process"
    assert behind.startswith("rank 1 owes operation 1 of 1 on dp, last ")
    assert behind.endswith(" (threads: not known)")
    gate.release()


def one_kind(process: Process) -> str:
    page = process.ordered()
    page.close()
    return page.kinds[1]


def test_threads_are_told_from_the_kernel_and_the_gate() -> None:
    script = "import threading,sys; e=threading.Event();"
    script += "threading.Thread(target=e.wait, daemon=True).start(); print(flush=True);"
    script += "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        told: dict[int, str] = {}
        # It has only just said that it is there: its threads may be on their way to sleep.
        while len(told) < 2 or not all(where.startswith("asleep") for where in told.values()):
            told = {place.tid: place.where for place in places(child.pid, {})}
        assert told[child.pid].startswith("asleep in read")
        (waiter,) = (where for tid, where in told.items() if tid != child.pid)
        assert waiter.startswith("asleep in futex")
        found = places(child.pid, {child.pid + 1: "at the gate"})
        assert (found[0].tid, found[0].where) == (child.pid + 1, "at the gate")
        child.communicate(b"")
    assert places(child.pid, {7: "at the gate"})[0].tid == 7
