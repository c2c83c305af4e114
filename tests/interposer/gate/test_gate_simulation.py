# SPDX-License-Identifier: Apache-2.0
"""The gate and its coordinator bring random programs to a boundary, whenever they are asked to.

Each program is stopped at random moments, given up at others, and has to end in any case. At a
boundary nothing is half begun, and where threads don't wait for each other behind the gate's back
it is the least cut that is safe. Then the same with a part of the algorithm broken.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from gate_actors import Thread
from gate_programs import STYLES
from gate_simulation import play_many, scratch
from gate_world import SimulatedPage, Violation, World
from simulated_gate import build

from liveshift.interposer.orders import OrderedPage
from liveshift.runtime.model.collective_clock import ClockReport, CollectiveClock
from liveshift.runtime.quiesce import host_gate
from liveshift.runtime.quiesce.host_gate import HostGate


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = scratch()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def lib() -> Any:
    return build()


@pytest.mark.parametrize("style", STYLES)
def test_programs_are_stopped_at_the_least_cut_and_end(lib: Any, folder: Path, style: str) -> None:
    seen = play_many(lib, style, range(40), folder)
    assert seen.converged > 40
    assert seen.abandoned > 0
    assert seen.raises > 0


# What must be found out, in which programs, within how many of them.
BROKEN = {
    "every thread raises targets for all pending operations": (
        "gate.c",
        ": owner != 0 ? PENDING_OTHERS",
        ": owner != 0 ? PENDING_OWN",
        "plain",
        40,
    ),
    "numbers that wait count as taken": (
        "gate.c",
        "return announced > gate->waiting[row] ? announced - gate->waiting[row] : 0;",
        "return announced;",
        "plain",
        20,
    ),
    "a raise is not told": (
        "gate.c",
        "atomic_store(&clock->raised, number);",
        "",
        "pool",
        20,
    ),
    "a thread waits for another without limit": (
        "gate.c",
        "pending == PENDING_OTHERS && within_limit &&\n"
        "                waiter->pending_ms < GATE_PENDING_LIMIT_MS",
        "pending == PENDING_OTHERS",
        "crossed",
        20,
    ),
    "a pool's later operation waits for the earlier": (
        "gate.c",
        "(within_limit || !in_flight(gate, wants, n))",
        "true",
        "pool",
        60,
    ),
    "an operation on a missing clock is not pending": (
        "gate.c",
        "uint32_t missing_count = atomic_load(&page->order.missing_count);",
        "uint32_t missing_count = 0;",
        "pool",
        40,
    ),
    "an agent that died is waited for": (
        "gate.c",
        "lease != 0 && waiter->silent_ms >= lease",
        "false",
        "crossed",
        40,
    ),
    "once opened by itself, open for ever": (
        "gate.c",
        "atomic_load(&gate->page->answer.reopened) == o.attempt",
        "atomic_load(&gate->page->answer.reopened) != 0",
        "pool",
        60,
    ),
    "targets let nothing pass while an operation is pending": (
        "gate.c",
        "if (found == PENDING_OWN)\n            return PENDING_OWN;\n    }\n    uint32_t",
        "if (found == PENDING_OWN)\n            return PENDING_OTHERS;\n    }\n    uint32_t",
        "plain",
        60,
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_gate_is_found_out(folder: Path, what: str) -> None:
    name, before, after, style, programs = BROKEN[what]
    broken = build((name, before, after))
    with pytest.raises(Violation):
        play_many(broken, style, range(programs), folder)


def found_out(lib: Any, folder: Path, style: str, programs: int) -> None:
    with pytest.raises(Violation):
        play_many(lib, style, range(programs), folder)


def test_looking_before_announcing_is_found_out(
    lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then neither the agent sees the operation nor the thread the order."""

    def announce(self: World, thread: Thread, row: int) -> Generator[bool, None, None]:
        passes = self.lib.sim_is_open(thread.process.gate)
        yield True
        self.lib.sim_announce(thread.process.gate, row, 1, thread.tid)
        self.passes = passes

    monkeypatch.setattr(World, "announce", announce)
    found_out(lib, folder, "blocking", 60)


def test_groups_that_are_half_announced_are_found_out(
    lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = SimulatedPage.answer
    monkeypatch.setattr(SimulatedPage, "answer", lambda self: true(self) | {"groups": 0})
    found_out(lib, folder, "plain", 80)


def test_a_raise_that_is_kept_from_the_others_is_found_out(
    lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_report(self: CollectiveClock, host: str, report: ClockReport) -> None:
        kept = {} if report.version else report.numbers
        true(self, host, ClockReport(report.version, kept, report.reached, report.pairs))

    true = CollectiveClock.add_report
    monkeypatch.setattr(CollectiveClock, "add_report", add_report)
    found_out(lib, folder, "plain", 20)


def test_pairs_that_are_not_told_are_found_out(
    lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostGate, "_note_pairs", lambda *_: None)
    found_out(lib, folder, "plain", 40)


def test_only_the_first_reading_of_a_page_is_found_out(
    lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reached its targets and was raised since is believed to stand."""
    true = HostGate.report
    said: dict[tuple[OrderedPage, ...], ClockReport] = {}

    def found(self: HostGate) -> ClockReport:
        report = true(self)
        if report.reached:
            said[tuple(self.pages)] = report
        return said.get(tuple(self.pages), report)

    monkeypatch.setattr(HostGate, "report", found)
    monkeypatch.setattr(host_gate, "_READINGS", 1)
    found_out(lib, folder, "plain", 60)
