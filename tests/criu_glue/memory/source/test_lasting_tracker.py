# SPDX-License-Identifier: Apache-2.0
"""A tracker that serves one freeze after the other of processes that go on in between.

SIGSTOP is here in the place of CRIU, which test_tracker_after_dump.py has.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from memory_subject import MANY, Subject
from page_chunks import DATA, PAGE, Pages
from stored_pages import page_digest, runs_of, stored
from tracked import finish

from liveshift.criu_glue.memory.engine import CHUNK
from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.ring import ChunkRing
from liveshift.criu_glue.memory.source.tracker import FrozenSet, MemoryTracker
from liveshift.criu_glue.memory.store.store import MemoryStore, read_table
from liveshift.errors import StepFailed

OWN = 700
"""The subject's interpreter writes fewer pages than this between two scans."""


class Holder:
    """A store to which one image comes after the other."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore.create(directory, 64 << 20)
        self.loses = range(0)
        """Chunks with pages of these addresses only are acknowledged and lost."""
        self.lost = self.bytes = 0
        self._counting = threading.Lock()

    def take(self, chunk: memoryview, release: Callable[[], None]) -> None:
        """All reading threads call this."""
        runs = list(runs_of(chunk))
        lost = all(at in self.loses and at + (n - 1) * PAGE in self.loses for at, n, _ in runs)
        if not lost:
            self.store.write(chunk)
        with self._counting:
            self.bytes += len(chunk)
            self.lost += lost
        release()

    def keep(self, tracker: MemoryTracker) -> FrozenSet:
        """The final dirty set and the table come, of processes that stand."""
        found = tracker.send_final_set(self.take)
        while wanted := self.store.wants():
            assert tracker.again(wanted, self.take) > 0
        self.store.end(read_table(msgspec.msgpack.encode(found.table)))
        return found

    def digest(self) -> bytes:
        return page_digest(stored(self.store))

    def differences(self, pid: int, found: FrozenSet) -> list[str]:
        """Where the image and a process that stands are not the same."""
        image = Pages()
        image.of, image.incarnations = stored(self.store), self.store.incarnations()
        return image.differences(pid, pid, found.table)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path)
    yield made
    made.store.close()


def snapshot(job: Subject, tracker: MemoryTracker, holder: Holder, *others: int) -> int:
    """One round, then the rest of processes that stand; return the bytes of both."""
    before = holder.bytes
    tracker.round(holder.take)
    with job.standing(*others):
        found = holder.keep(tracker)
        for pid in (job.pid, *others):
            assert holder.differences(pid, found) == []
    assert tracker.digest() == holder.digest()
    return holder.bytes - before


def write(job: Subject, pages: list[int], value: int) -> None:
    """Each of the pages gets a content that none of them had with another value."""
    job.do(f"[put(page, {value} * {MANY} + page) for page in {pages}]")


@pytest.mark.root
def test_each_of_ten_images_is_the_memory_of_its_freeze(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    chance = random.Random(1)
    job.do("child = os.fork() or signal.pause()")
    child = job.number("child")
    assert snapshot(job, tracker, holder, child) > MANY * PAGE
    tracker.image_complete()
    for number in range(2, 11):
        write(job, chance.sample(range(MANY), 300), number)
        sent = snapshot(job, tracker, holder, child)
        assert 290 * PAGE < sent < (300 + 2 * OWN) * PAGE
        tracker.image_complete()


@pytest.mark.root
def test_what_is_written_between_round_and_freeze_comes_once(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    """The freeze protects nothing, so the next round reads its pages again, and drops them."""
    snapshot(job, tracker, holder)
    tracker.image_complete()
    write(job, list(range(1000)), 1)
    with job.standing():
        assert holder.keep(tracker).dirty_bytes >= 1000 * PAGE
    tracker.image_complete()
    again = tracker.round(holder.take)
    assert again.dirty_bytes >= 1000 * PAGE
    assert again.sent_bytes < OWN * PAGE
    assert tracker.round(holder.take).dirty_bytes < OWN * PAGE


@pytest.mark.root
def test_after_a_barrier_that_failed_everything_comes_again(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    snapshot(job, tracker, holder)
    tracker.image_complete()
    write(job, list(range(300)), 1)

    def breaks(chunk: memoryview, release: Callable[[], None]) -> None:
        release()
        raise StepFailed("ship", "the lanes broke")

    with pytest.raises(StepFailed, match="the lanes broke"):
        tracker.round(breaks)
    with pytest.raises(StepFailed, match="has lost the record of what it sent"):
        tracker.round(holder.take)
    tracker.forget_sent()
    assert snapshot(job, tracker, holder) > MANY * PAGE
    tracker.image_complete()
    assert snapshot(job, tracker, holder) < OWN * PAGE


@pytest.mark.root
def test_a_chunk_that_was_acknowledged_and_lost_shows_in_the_digest(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    """The store has an older page in its place, so no page of the table is missing there."""
    snapshot(job, tracker, holder)
    tracker.image_complete()
    write(job, list(range(1500)), 1)
    start = job.number("address()")
    holder.loses = range(start, start + 1500 * PAGE)
    tracker.round(holder.take)
    holder.loses = range(0)
    assert holder.lost > 0
    with job.standing():
        found = holder.keep(tracker)
        assert len(holder.differences(job.pid, found)) >= holder.lost
    assert tracker.digest() != holder.digest()
    tracker.forget_sent()
    assert snapshot(job, tracker, holder) > MANY * PAGE


@pytest.mark.root
def test_what_was_forgotten_has_no_digest(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    snapshot(job, tracker, holder)
    tracker.forget_sent()
    with pytest.raises(StepFailed, match="memory: a page of the image was not sent"):
        tracker.digest()


@pytest.mark.root
def test_a_freeze_that_was_stopped_leaves_nothing_out_of_the_next(
    job: Subject, tracker: MemoryTracker, holder: Holder
) -> None:
    tracker.round(holder.take)
    write(job, list(range(1500)), 1)
    tracker.stopped = lambda: True
    with job.standing(), pytest.raises(PullStopped):
        tracker.send_final_set(holder.take)
    tracker.stopped = lambda: False
    snapshot(job, tracker, holder)


@pytest.mark.root
def test_what_makes_a_round_stop_may_be_set_anew(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.stopped = lambda: pages.chunks > 0
    with pytest.raises(PullStopped):
        tracker.round(pages)
    tracker.stopped = lambda: False
    tracker.round(pages)
    finish(job, tracker, pages)


@pytest.mark.root
def test_the_destination_may_drop_what_the_table_does_not_name(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.round(pages)
    start = job.number("address()")
    job.do("memory.madvise(mmap.MADV_DONTNEED, 0, 1024 * 4096)")
    finish(job, tracker, pages)
    dropped = [start + n * PAGE for n in range(1024)]
    for address in dropped:
        del pages.of[job.pid][address]
    tracker.image_complete()
    before = pages.kinds[DATA]
    job.do("[put(page, page + 1) for page in range(1024)]")  # as they were
    tracker.round(pages)
    assert pages.kinds[DATA] - before >= 1024
    assert set(dropped) <= pages.of[job.pid].keys()
    finish(job, tracker, pages)


@pytest.mark.root
def test_what_was_read_past_the_page_cache_is_in_the_image_and_tracked_from_then_on(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("direct = os.open(sys.executable, os.O_DIRECT)")
    words = {job.pid: "it does I/O past the page cache (O_DIRECT)"}
    assert tracker.round(pages).untracked == words
    job.do("os.close(direct)")
    assert tracker.round(pages).untracked == words, "what was read before did not come in full yet"
    assert finish(job, tracker, pages).dirty_bytes > MANY * PAGE
    tracker.image_complete()
    assert tracker.round(pages).untracked == {}
    assert finish(job, tracker, pages).dirty_bytes < OWN * PAGE
    job.do("direct = os.open(sys.executable, os.O_DIRECT)")
    assert tracker.round(pages).untracked == words


@pytest.mark.root
def test_a_store_that_knows_a_later_incarnation_takes_what_comes_under_one_as_high(
    job: Subject, pages: Pages, tmp_path: Path
) -> None:
    """As after a restart of the agent: the new tracker knows nothing of what the old one sent."""
    tracker = MemoryTracker(lambda: [job.pid])
    try:
        tracker.forget_sent(5)
        job.do("child = os.fork() or signal.pause()")
        tracker.round(pages)
        assert pages.incarnations == {job.pid: 5}
        tracker.forget_sent(3)
        tracker.round(pages)
        assert pages.incarnations == {job.pid: 5}, "it is never lowered"
        tracker._tasks = lambda: [job.pid, job.number("child")]
        tracker.round(pages)
        assert pages.incarnations == {job.pid: 5, job.number("child"): 5}
    finally:
        tracker.close()


def test_a_ring_that_rests_has_no_memory_until_it_is_used_again() -> None:
    ring = ChunkRing(2)
    first = ring.next_slot(lambda: False)
    assert first is not None
    first.memory[:4] = b"full"
    ring.rest()
    assert bytes(first.memory[:4]) == b"full", "a chunk is under way"
    first.release()
    ring.rest()
    second = ring.next_slot(lambda: False)
    assert second is not None
    assert len(second.memory) == CHUNK
    assert bytes(second.memory[:4]) == bytes(4), "the kernel has given new memory"
    second.release()
    ring.close()
    ring.rest()
    assert ring.next_slot(lambda: False) is None


def test_the_memory_of_a_ring_goes_back_when_it_is_closed() -> None:
    ring = ChunkRing(64)
    before = _resident()
    ring.close()
    assert before - _resident() > 60 << 20


def _resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
