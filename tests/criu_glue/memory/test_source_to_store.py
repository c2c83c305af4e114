# SPDX-License-Identifier: Apache-2.0
"""The source's C reads this process's own memory, and the destination's C takes the chunks.

No root is needed: nothing is tracked, every page that exists is found as at a freeze.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cffi import FFI
from stored_pages import page_digest, runs_of, stored

from liveshift.criu_glue.memory.engine import PAGE
from liveshift.criu_glue.memory.source import source_engine
from liveshift.criu_glue.memory.source.pulling import Pulling, unthrottled
from liveshift.criu_glue.memory.source.ring import ChunkRing
from liveshift.criu_glue.memory.source.source_engine import Pull, Regions, Sent
from liveshift.criu_glue.memory.store.store import MemoryStore, ProcessTable

PAGES = 2048
INNER = 7


class Memory:
    """Anonymous memory of this process: pages of data, of zeros, and pages that do not exist."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        ffi = FFI()
        self.start = int(ffi.cast("uintptr_t", ffi.from_buffer(self.map)))
        self.content: dict[int, bytes] = {}
        """By number of the page."""
        self.dropped: dict[int, bytes] = {}
        """What was the content of pages that do not exist any more."""
        self.random = random.Random(1)
        for n in range(PAGES):
            kind = self.random.random()
            if kind < 0.2:
                continue
            self.write(n, self.random.randbytes(16) * (PAGE // 16) if kind < 0.8 else bytes(PAGE))

    def write(self, n: int, content: bytes) -> None:
        self.map[n * PAGE : (n + 1) * PAGE] = content
        self.content[n] = content

    def drop(self, n: int) -> None:
        self.map.madvise(mmap.MADV_DONTNEED, n * PAGE, PAGE)
        self.dropped[n] = self.content.pop(n)

    def present(self) -> Regions:
        found = Regions()
        with _opened("/proc/self/pagemap") as pagemap:
            assert source_engine.known_categories(), "this kernel has no PAGEMAP_SCAN"
            end = self.start + PAGES * PAGE
            source_engine.scan_present(pagemap, [(self.start, end)], found)
        return found


class _opened:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore.create(tmp_path, 2 * PAGES * PAGE)
    yield made
    made.close()


def send(
    memory: Memory, sent: Sent, store: MemoryStore, threads: int, number: int, alone: bool
) -> tuple[Regions, int, int]:
    """Send all pages that the destination may not have, as at a freeze. Return the table, the
    bytes of all chunks, and how many pages were in them."""
    present, stale = Regions(), Regions()
    source_engine.classify(memory.present(), True, sent, present, stale)
    ring = ChunkRing(4)
    pulling = Pulling(threads, ring)
    counts: list[int] = []

    def sink(chunk: memoryview, release: Callable[[], None]) -> None:
        counts.append(sum(pages for _, pages, _ in runs_of(chunk)))
        store.write(chunk)
        release()

    with _opened("/proc/self/mem") as mem, _opened("/proc/self/pagemap") as pagemap:
        pull = Pull(
            os.getpid(),
            mem,
            -1 if alone else pagemap,
            inner=INNER,
            incarnation=1,
            round=number,
            number=number,
            regions=stale,
            sent=sent,
        )
        size = pulling.pull([pull], sink, unthrottled, lambda: False)
    pulling.close()
    ring.close()
    assert not pull.ended
    assert pull.unreadable == (0, 0)
    return present, size, sum(counts)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_store_has_what_the_source_has_read(
    store: MemoryStore, threads: int, alone: bool
) -> None:
    memory, sent = Memory(), Sent()
    first, size, pages = send(memory, sent, store, threads, 0, alone)
    assert (first.size, pages) == (len(memory.content) * PAGE, len(memory.content))
    assert size > sum(map(any, memory.content.values())) * PAGE

    changed = memory.random.sample(sorted(memory.content), 50)
    for n in changed:
        memory.write(n, memory.random.randbytes(PAGE))
    table, size, pages = send(memory, sent, store, threads, 1, alone)
    assert pages == len(changed)
    assert 50 * PAGE < size < 200 * PAGE

    store.end({INNER: ProcessTable(1, table.runs())})
    expected = {memory.start + n * PAGE: content for n, content in memory.content.items()}
    assert stored(store) == {INNER: expected}
    assert source_engine.digest([(INNER, sent, table)]) == page_digest({INNER: expected})


def test_a_digest_is_of_all_processes_and_of_no_page_that_was_not_sent(store: MemoryStore) -> None:
    memory, sent, forgotten = Memory(), Sent(), Regions()
    table, _, _ = send(memory, sent, store, 1, 0, True)
    pages = {memory.start + n * PAGE: content for n, content in memory.content.items()}
    both = [(INNER, sent, table), (INNER + 1, sent, table)]
    assert source_engine.digest(both) == source_engine.digest(reversed(both))
    assert source_engine.digest(both) == page_digest({INNER: pages, INNER + 1: pages})
    assert source_engine.digest([]) == page_digest({}) == bytes(16)
    one = memory.start + min(memory.content) * PAGE
    sent.forget(one, one + PAGE, forgotten)
    for unsent in (sent, Sent()):
        with pytest.raises(OSError, match="digest") as raised:
            source_engine.digest([(INNER, unsent, table)])
        assert raised.value.errno == errno.ENODATA


def test_a_pre_copy_may_go_on_for_days(store: MemoryStore) -> None:
    """Each round is a pass or more, and rounds come several times a second."""
    memory, sent = Memory(), Sent()
    send(memory, sent, store, 1, 1 << 16, True)
    memory.write(0, bytes([7]) * PAGE)
    _, _, pages = send(memory, sent, store, 1, (1 << 16) + 1, True)
    assert pages == 1


@pytest.mark.timeout(10)
def test_a_request_for_pages_at_the_end_of_all_addresses_ends(store: MemoryStore) -> None:
    memory, sent, forgotten = Memory(), Sent(), Regions()
    send(memory, sent, store, 1, 0, True)
    sent.forget((1 << 64) - 2 * PAGE, (1 << 64) - PAGE, forgotten)
    assert forgotten.size == 0


def test_what_was_sent_can_be_forgotten(store: MemoryStore) -> None:
    memory, sent, forgotten = Memory(), Sent(), Regions()
    send(memory, sent, store, 2, 0, True)
    sent.forget(memory.start, memory.start + PAGES // 2 * PAGE, forgotten)
    half = sum(n < PAGES // 2 for n in memory.content)
    assert forgotten.size == half * PAGE
    _, _, pages = send(memory, sent, store, 2, 1, True)
    assert pages == half
    sent.clear()
    _, _, pages = send(memory, sent, store, 2, 2, True)
    assert pages == len(memory.content)


def test_pages_that_were_gone_at_the_freeze_can_be_forgotten(store: MemoryStore) -> None:
    """With 8 MiB there are blocks of which all pages have gone, and blocks of which some have."""
    memory, sent = Memory(), Sent()
    send(memory, sent, store, 1, 0, True)
    gone = [n for n in memory.content if n % 7 == 0 or n < 3 * PAGES // 4 - 100]
    for n in gone:
        memory.drop(n)
    left, _, pages = send(memory, sent, store, 1, 1, True)
    assert (left.size, pages) == (len(memory.content) * PAGE, 0)
    sent.keep(left)
    _, _, pages = send(memory, sent, store, 1, 2, True)
    assert pages == 0, "what is still there was not forgotten"
    for n in gone:
        memory.write(n, memory.dropped[n])
    _, _, pages = send(memory, sent, store, 1, 3, True)
    assert pages == len(gone), "they are as they were, and are sent again"
    sent.keep(Regions())
    Sent().keep(left)  # neither does it matter to a record of nothing
    _, _, pages = send(memory, sent, store, 1, 4, True)
    assert pages == len(memory.content)
