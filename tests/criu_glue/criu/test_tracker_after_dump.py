# SPDX-License-Identifier: Apache-2.0
"""The tracker goes on after a dump by a real CRIU: the kernel still notes what is written.

If it did not, a later image would have an old page, and nothing would show that: the source's hash
would be as old as the page. So each image is compared with the memory of the frozen processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from captured import ROOT_PID, Sink, sink
from page_chunks import PAGE, Pages
from sandbox_trees import SandboxMaker, criu, goes_on, new_sandboxes, place
from stored_pages import page_digest, stored

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import inner_pid, tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.page_filter import PageFilter
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.memory.source.source_engine import Ranges
from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.criu_glue.memory.store.store import MemoryStore, read_table
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

BIG = 8 << 20
"""Bytes of memory of each of two processes."""
HOT = 64 * PAGE
"""Bytes that each of their threads writes again and again."""
LITTLE = BIG
"""Both processes together, with their interpreters, write less than this between two dumps."""

WRITING = f"""
import ctypes, mmap
memory = mmap.mmap(-1, {BIG}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for at in range(0, {BIG}, {PAGE}): memory[at:at + 8] = at.to_bytes(8, "little")
child = os.fork()
def write(first, pause):
    number = 0
    while True:
        number += 1
        ctypes.memset(start + first + number * {PAGE} % {HOT}, number // 100 % 256, {PAGE})
        if pause: time.sleep(pause)
for place, pause in (({HOT}, 0), (2 * {HOT}, 0.0005), (3 * {HOT}, 0.0002)):
    if child or pause: threading.Thread(target=write, args=(place, pause), daemon=True).start()
number = 0
while True:
    number += 1
    at = 4 * {HOT} + number * {PAGE} * 7 % {HOT}
    memory[at:at + 8] = (number << 20).to_bytes(8, "little")
    if child: os.write(1, b"%d\\n" % number)
    time.sleep(0.002)
"""
"""Two processes, one of which was forked. In the first a thread writes without any pause, so it
does so when CRIU stops it and when CRIU lets it go."""


class Image(NamedTuple):
    dirty_bytes: int
    differences: list[str]
    """Where the store and the frozen processes were not the same."""
    digest: bytes


class Capsule:
    """A tree with its tracker, and the store to which its images come."""

    def __init__(self, here: Sandbox, criu: Criu, place: Path, sink: Sink) -> None:
        self.here = here
        self._criu, self._place, self._sink = criu, place, sink
        (place / "store").mkdir()
        self.store = MemoryStore.create(place / "store", 128 << 20)
        self.tracker = MemoryTracker(lambda: [task.pid for task in tasks(here)])
        self.refuses = False
        """Whether the destination refuses CRIU's image once it has all memory."""
        self._has_memory = threading.Event()
        self._dumps = 0

    def close(self) -> None:
        self.tracker.close()
        self.store.close()

    def take(self, chunk: memoryview, release: Callable[[], None]) -> None:
        self.store.write(chunk)
        release()

    def _take_image(self, name: str, data: bytes) -> None:
        # CRIU dumps the core of a task after its memory.
        if self.refuses and name.startswith("core-"):
            assert self._has_memory.wait(30)
            raise StepFailed("ship", "the holder has no room")
        self._sink(name, data)

    @contextmanager
    def dumped(self) -> Iterator[Image]:
        """CRIU holds the tree meanwhile, and the store has its memory."""
        self._dumps += 1
        images = self._place / f"images-{self._dumps}"
        self._sink.images.clear()
        self._sink.ended.clear()
        self._has_memory.clear()
        frozen, page_filter = FrozenTree(self.here, ROOT_PID, images), PageFilter(images)
        with ThreadPoolExecutor(1) as pool:
            dump = pool.submit(frozen.dump, self._criu, self._take_image, 60, page_filter)
            try:
                self.tracker.wait_frozen(time.monotonic() + 60, page_filter.asked)
                hidden: dict[int, Ranges] = {}
                image = self._send_rest(hidden)
                page_filter.hide(hidden)
                self._has_memory.set()
            finally:
                dump.result()
        try:
            yield image
        finally:
            frozen.thaw()

    def _send_rest(self, hidden: dict[int, Ranges]) -> Image:
        """CRIU waits for the ranges meanwhile, so that not even the kernel writes to a task. What
        CRIU does to the tasks after that has to be in the next image."""
        found = self.tracker.send_final_set(self.take, hidden.update)
        while wanted := self.store.wants():
            assert self.tracker.again(wanted, self.take) > 0
        self.store.end(read_table(msgspec.msgpack.encode(found.table)))
        has = Pages()
        has.of, has.incarnations = stored(self.store), self.store.incarnations()
        inner = {task.pid: inner_pid(task.pid) for task in tasks(self.here)}
        assert set(inner.values()) == found.table.keys() == has.of.keys()
        wrong = [
            where for pid, of in inner.items() for where in has.differences(pid, of, found.table)
        ]
        return Image(found.dirty_bytes, wrong, page_digest(has.of))


@pytest.fixture
def capsule(criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> Iterator[Capsule]:
    made = Capsule(new_sandboxes.counting(WRITING), criu, place, sink)
    assert made.tracker.probe() == ""
    yield made
    made.close()


@pytest.mark.root
@pytest.mark.parametrize(
    "dumps", [3, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_after_each_dump_a_round_lists_what_was_written_and_nothing_else(
    capsule: Capsule, dumps: int
) -> None:
    first = capsule.tracker.round(capsule.take)
    assert first.untracked == {}
    assert first.dirty_bytes > 2 * BIG
    for _ in range(dumps):
        with capsule.dumped() as image:
            assert image.differences == []
            assert 0 < image.dirty_bytes < LITTLE
        assert goes_on(capsule.here)
        assert capsule.tracker.digest() == image.digest, "also of processes that run again"
        capsule.tracker.image_complete()
        later = capsule.tracker.round(capsule.take)
        assert later.untracked == {}
        assert HOT <= later.dirty_bytes < LITTLE


@pytest.mark.root
def test_without_a_round_in_between_the_next_dump_finds_it_all(capsule: Capsule) -> None:
    """The last pass protects nothing: what one dump has found, the next one finds again."""
    capsule.tracker.round(capsule.take)
    for _ in range(2):
        with capsule.dumped() as image:
            assert image.differences == []
            assert HOT <= image.dirty_bytes < LITTLE
        assert goes_on(capsule.here)
        capsule.tracker.image_complete()


@pytest.mark.root
def test_after_a_dump_that_failed_everything_goes_and_the_next_one_is_right(
    capsule: Capsule,
) -> None:
    capsule.tracker.round(capsule.take)
    capsule.refuses = True
    with pytest.raises(StepFailed, match="the holder has no room"), capsule.dumped():
        pass
    capsule.refuses = False
    assert goes_on(capsule.here)
    capsule.tracker.forget_sent()
    assert capsule.tracker.round(capsule.take).dirty_bytes > 2 * BIG
    assert goes_on(capsule.here)
    with capsule.dumped() as image:
        assert image.differences == []
        assert image.dirty_bytes < LITTLE
