# SPDX-License-Identifier: Apache-2.0
"""A real CRIU that is told of memory which it need not dump."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from page_chunks import Pages, anonymous_ranges
from sandbox_trees import SandboxMaker, criu, goes_on, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import inner_pid, tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.page_filter import PageFilter
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

BIG = 64 << 20

HOLDER = f"""
import mmap
memory = mmap.mmap(-1, {BIG}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, {BIG}, 4096): memory[at:at + 8] = at.to_bytes(8, "little")
child = os.fork()
number = 0
while True:
    number += 1
    at = number * 4096 * 7 % {BIG}
    memory[at:at + 8] = (number << 20).to_bytes(8, "little")
    if child: os.write(1, b"%d\\n" % number)
    time.sleep(0.002)
"""


def _before_others() -> None:
    """This thread gets a processor at once whenever it can run; what it starts, CRIU, does not."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def host_pids(sandbox: Sandbox) -> list[int]:
    return [task.pid for task in tasks(sandbox)]


def dumped(sink: Sink) -> int:
    """Bytes of memory in the image."""
    return sum(len(data) for name, data in sink.images.items() if name.startswith("pages-"))


@pytest.mark.root
def test_criu_dumps_no_page_of_what_is_hidden_and_the_tracker_has_sent_all_of_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(HOLDER)
    page_filter = PageFilter(place / "images")
    pages = Pages()
    tracker = MemoryTracker(lambda: host_pids(here))
    assert tracker.probe() == ""
    for _ in range(2):
        assert tracker.round(pages).processes == 2
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    errors: list[BaseException] = []

    def dump() -> None:
        try:
            frozen.dump(criu, sink, 60, page_filter)
        except BaseException as error:
            errors.append(error)

    dumping = threading.Thread(target=dump)
    dumping.start()
    tracker.wait_frozen(time.monotonic() + 10, page_filter.asked)
    found = tracker.send_final_set(pages, page_filter.hide)
    dumping.join()
    assert errors == []
    assert dumped(sink) < 4e6
    for pid in host_pids(here):
        assert found.ranges[inner_pid(pid)] == anonymous_ranges(pid)
        assert pages.differences(pid, inner_pid(pid), found.table) == []
    frozen.thaw()
    tracker.close()
    assert goes_on(here)


@pytest.mark.root
@pytest.mark.parametrize("told", [True, False], ids=["too late", "in time"])
def test_that_they_stand_is_seen(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, told: bool
) -> None:
    """By CRIU's own word where somebody comes too late to see it: its own code runs in each process
    then, whose first thread stands no more. Else before it asks for the ranges: what is done
    meanwhile takes no time of the freeze. That moment is short: on a busy machine the tracker
    may miss it, as wait_stopped says, so in this test it need not wait for a processor."""
    here = new_sandboxes.counting(HOLDER)
    page_filter, pages = PageFilter(place / "images"), Pages()
    tracker = MemoryTracker(lambda: host_pids(here))
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    with ThreadPoolExecutor(initializer=_before_others) as pool:
        dumping = pool.submit(frozen.dump, criu, sink, 60, page_filter)
        if told:
            until(page_filter.asked)
            tracker.wait_frozen(time.monotonic() + 5, page_filter.asked)
        else:
            pool.submit(tracker.wait_frozen, time.monotonic() + 8).result()
        tracker.send_final_set(pages, page_filter.hide)
        dumping.result(30)
    assert dumped(sink) < 4e6
    frozen.thaw()
    tracker.close()
    assert goes_on(here)


@pytest.mark.root
@pytest.mark.parametrize("said", [True, False], ids=["nothing hidden", "nothing said"])
def test_without_ranges_criu_dumps_everything(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, said: bool
) -> None:
    here = new_sandboxes.counting(HOLDER)
    page_filter = PageFilter(place / "images", patience_s=0.2)
    if said:
        page_filter.hide({})
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60, page_filter)
    assert dumped(sink) > BIG
    frozen.thaw()
    assert goes_on(here)


@pytest.mark.root
def test_a_dump_whose_ranges_will_not_come_ends_at_once(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """Neither does CRIU wait for them, nor does it dump everything in their place."""
    here = new_sandboxes.counting(HOLDER)
    page_filter = PageFilter(place / "images")
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    asked: list[float] = []

    def look() -> None:
        if page_filter.asked():
            asked.append(time.monotonic())
            raise StepFailed("memory", "the lane broke")

    with pytest.raises(StepFailed, match="the lane broke"):
        frozen.dump(criu, sink, 60, page_filter, look)
    assert time.monotonic() - asked[0] < 30, "it does not wait for the end of its 60 s"
    assert dumped(sink) < BIG / 4
    assert goes_on(here)


@pytest.mark.root
def test_parts_of_a_mapping_are_hidden_to_the_page(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """CRIU asks for windows of several mappings; the rest of each must still be found."""
    here = new_sandboxes.counting(HOLDER)
    pid = next(pid for pid in host_pids(here) if inner_pid(pid) == ROOT_PID)
    start, end = max(anonymous_ranges(pid), key=lambda pair: pair[1] - pair[0])
    holes = [(at, at + 3 * 4096) for at in range(start, end, 16 * 4096)]
    page_filter = PageFilter(place / "images")
    page_filter.hide({ROOT_PID: holes})
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60, page_filter)
    both = dumped(sink)
    assert 2 * BIG * 27 / 32 < both < 2 * BIG * 29 / 32 + 16e6
    frozen.thaw()
    assert goes_on(here)


def test_ranges_of_an_earlier_dump_are_not_taken(tmp_path: Path) -> None:
    PageFilter(tmp_path).hide({1: [(0, 4096)]})
    assert (tmp_path / "hide").read_text() == "1 0 1000\n"
    PageFilter(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_tree_that_is_not_frozen_in_time_is_named() -> None:
    tracker = MemoryTracker(lambda: [os.getpid()])
    with pytest.raises(StepFailed, match=rf"did not stop .* of process {os.getpid()}"):
        tracker.wait_frozen(time.monotonic() + 0.05)
    tracker.close()
