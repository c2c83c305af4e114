# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between an agent and a CRIU that has memory already; nothing is lost by it."""

from __future__ import annotations

import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from captured import sink
from early_stage import (
    ALONE,
    NO_RESERVE,
    Stage,
    Stages,
    is_whole_and_goes_on,
    restore,
    restore_misses_what_is_lost,
    restore_plainly,
    scene,
    staged,
    without_room_for_both,
)
from memory_parts import PAGE
from sandbox_trees import criu, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.memory.prefill import prefill
from liveshift.criu_glue.memory.prefill.prefill import BLOCK, Prefill

__all__ = ["criu", "new_sandboxes", "place", "scene", "sink", "staged"]

Order = Callable[[], int]
FIRST_SLOT = 3  # page_map.h


def around_the_first_back(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[Prefill, Order, list[int]], int]
) -> list[int]:
    """Have it in hand, with the places in the store's file that it is for; counts such orders."""
    real, given = Prefill._order, [0]

    def order(self: Prefill, op: int, *more: Any, **named: Any) -> int:
        if op != prefill._WRITE_BACK:
            return real(self, op, *more, **named)
        given[0] += 1
        if given[0] > 1:
            return real(self, op, *more, **named)
        slots = [slot - FIRST_SLOT for (slot,) in struct.iter_unpack("<I", named["more"])]
        return around(self, lambda: real(self, op, *more, **named), slots)

    monkeypatch.setattr(Prefill, "_order", order)
    return given


def early_pid(stage: Stage) -> int:
    found = stage.early.held.tree().values()
    return max(found, key=lambda pid: psutil.Process(pid).memory_info().rss)


@pytest.mark.long
@pytest.mark.root
def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_another_order(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be brought back may be in the store or not: so it is missed."""
    stage = staged(NO_RESERVE)
    without_room_for_both(stage, monkeypatch)
    pid = early_pid(stage)

    def too_late(orders: Prefill, order: Order, _: list[int]) -> int:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: _states_of_threads(pid) == {"T"})  # else the one that answers may go on yet
        orders._orders.settimeout(0.3)
        try:
            return order()
        finally:
            os.kill(pid, signal.SIGCONT)

    given = around_the_first_back(monkeypatch, too_late)
    absent = stage.store.lost
    assert not stage.early.prepare()
    assert "does not answer" in stage.early.why
    assert given[0] > 1, "it was tried again"
    assert stage.store.lost == absent > 60 << 20
    until(lambda: not stage.early.held.alive())
    restore_misses_what_is_lost(stage)


@pytest.mark.root
def test_a_block_that_was_brought_back_in_part_is_brought_back_whole(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages stay where they lie until all of them are written."""
    stage = staged(NO_RESERVE)
    without_room_for_both(stage, monkeypatch)
    pid = early_pid(stage)

    def full(_: Prefill, order: Order, places: list[int]) -> int:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        middle = sorted(place for place in places if place >= 0)[BLOCK // PAGE // 2]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (middle * PAGE, before[1]))
        try:
            return order()
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    given = around_the_first_back(monkeypatch, full)
    assert not stage.early.prepare()
    assert stage.early.why == "[Errno 5] Input/output error"
    assert given[0] > 30
    assert stage.store.lost == 0
    stage.parted.end_source()
    restore_plainly(stage)


@pytest.mark.root
def test_the_kernel_makes_no_huge_pages_where_something_may_have_been_let_go_of(
    staged: Stages,
) -> None:
    """khugepaged would make zeros of it, which count as filled."""
    stage = staged(ALONE)
    stage.bring_over()
    assert _huge_pages(early_pid(stage)) == "0"
    tree, seen = restore(stage)
    assert seen.preplaced > 100 << 20
    is_whole_and_goes_on(stage, tree, pages=30000)
    assert {_huge_pages(task.pid) for task in tasks(stage.there)} == {"1"}, "it has its own"


def _states_of_threads(pid: int) -> set[str]:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rsplit(")", 1)[1].split()[0] for stat in stats}


def _huge_pages(pid: int) -> str:
    """Whether the kernel makes them (proc(5), THP_enabled)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("THP_enabled:"))
