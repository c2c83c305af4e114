# SPDX-License-Identifier: Apache-2.0
"""Which memory the source carries, and what it does where the kernel cannot follow all writes."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest
from memory_subject import Subject
from page_chunks import PAGE, Pages
from slow_file import slow_file
from tracked import finish
from waits import until

from liveshift.criu_glue.memory.source import source_engine
from liveshift.criu_glue.memory.source.tracker import MemoryTracker

pytestmark = pytest.mark.root


KINDS = """
def area(protection=3): return libc.mmap(None, 16 * 4096, protection, 0x22, -1, 0)
def filled(protection=3):
    at = area(); ctypes.memset(at, 9, 16 * 4096)
    libc.mprotect(ctypes.c_void_p(at), 16 * 4096, protection); return at
hidden, readable, code, locked, guarded = filled(0), filled(1), filled(5), filled(), filled()
assert libc.mlock(ctypes.c_void_p(locked), 16 * 4096) == 0
advise = lambda at, n, how: libc.madvise(ctypes.c_void_p(at), n * 4096, how)
guards = advise(guarded, 4, 102)
shared = mmap.mmap(-1, 16 * 4096); shared[0] = 1
huge = libc.mmap(None, 8 << 20, 3, 0x22, -1, 0); advise(huge, 2048, 14)
ctypes.memset(huge, 3, 8 << 20)
"""


def test_each_kind_of_memory(job: Subject, tracker: MemoryTracker, pages: Pages) -> None:
    job.do(f"exec({KINDS!r}, known)")
    tracker.round(pages)
    job.do("ctypes.memset(huge + 12345, 4, 100)")
    found = finish(job, tracker, pages)

    def ours(name: str) -> bool:
        at = job.number(name)
        return any(start <= at < end for start, end in found.ranges[job.pid])

    assert ours("hidden")  # no program may read it now, and its content counts
    assert pages.of[job.pid][job.number("hidden")] == b"\x09" * PAGE
    assert ours("readable")
    assert ours("huge")
    assert not ours("code")
    assert not ours("locked")
    assert not ours("address(shared)")
    if job.do("guards") == "0":  # Linux 6.13
        assert job.number("guarded") not in pages.of[job.pid]
        assert job.number("guarded") + 4 * PAGE in pages.of[job.pid]


PINNED = """
import struct
parameters = ctypes.create_string_buffer(120)
ring = libc.syscall(425, 4, parameters)
assert ring >= 0, ctypes.get_errno()
sq = struct.unpack_from("<10I", parameters, 40)
queue = mmap.mmap(ring, sq[6] + 4 * 4)
entries = mmap.mmap(ring, 4 * 64, offset=0x10000000)
buffer = mmap.mmap(-1, 16 * 4096, flags=PRIVATE)
buffer.write(b"a" * 16 * 4096)
vector = ctypes.create_string_buffer(struct.pack("<QQ", address(buffer), 16 * 4096))
assert libc.syscall(427, ring, 0, vector, 1) == 0, ctypes.get_errno()
content = os.memfd_create("content"); os.write(content, b"b" * 16 * 4096)
def read_fixed():
    struct.pack_into("<BBHiQQIIQH", entries, 0, 4, 0, 0, content, 0, address(buffer), 16 * 4096,
                     0, 0, 0)
    tail, = struct.unpack_from("<I", queue, sq[1])
    struct.pack_into("<I", queue, sq[6] + tail % 4 * 4, 0)
    struct.pack_into("<I", queue, sq[1], tail + 1)
    return libc.syscall(426, ring, 1, 1, 1, None, 0)
"""


def test_what_is_written_past_the_page_tables_is_found(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    """By a kernel that has the pages pinned, as it has for RDMA: no tracking sees that."""
    job.do(f"exec({PINNED!r}, known)")
    at = job.number("address(buffer)")
    words = tracker.round(pages).untracked
    assert words == {job.pid: "it has memory pinned for a device"}
    tracker.round(pages)
    assert job.do("read_fixed()") == "1"
    tracker.round(pages)
    assert pages.of[job.pid][at] == b"a" * PAGE, "it was tracked, and needs no reading again"
    finish(job, tracker, pages)
    assert pages.of[job.pid][at] == b"b" * PAGE


def test_files_that_are_read_past_the_page_cache_are_noticed(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("direct = os.open(sys.executable, os.O_DIRECT)")
    words = tracker.round(pages).untracked
    assert words == {job.pid: "it does I/O past the page cache (O_DIRECT)"}
    finish(job, tracker, pages)


def test_what_is_being_read_past_the_page_cache_is_read_again(
    job: Subject, tracker: MemoryTracker, pages: Pages, tmp_path: Path
) -> None:
    """The kernel holds the pages of a read() from such a file until the answer comes, and then
    writes to them whatever their protection is."""
    job.do("buffer = mmap.mmap(-1, 16 * 4096, flags=PRIVATE); buffer.write(b'a' * 16 * 4096)")
    at = job.number("address(buffer)")
    with slow_file(tmp_path, b"b" * 16 * PAGE) as file:
        job.do(f"slow = os.open({str(file.path)!r}, os.O_RDONLY)")
        assert tracker.round(pages).untracked == {}, "nobody reads yet"
        job.do("reader = threading.Thread(target=os.preadv, args=(slow, [buffer], 0))")
        job.do("reader.start()")
        until(file.asked.is_set)
        words = tracker.round(pages).untracked
        assert words == {job.pid: "it reads from a file system that may pass by the page cache"}
        file.answer.set()
        job.do("reader.join()")
        tracker.round(pages)
        assert pages.of[job.pid][at] == b"a" * PAGE, "it was tracked, and needs no reading again"
        job.do("os.close(slow)")
    finish(job, tracker, pages)
    assert pages.of[job.pid][at] == b"b" * PAGE


@pytest.mark.machine("Linux 6.11 (MAP_DROPPABLE)")
def test_what_was_protected_beside_what_cannot_be_tracked_is_not_lost() -> None:
    """Of a range that was listed a part has become memory of a kind that nobody can track."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = os.O_CLOEXEC | os.O_NONBLOCK | 1
    uffd, pagemap = libc.syscall(323, flags), os.open("/proc/self/pagemap", os.O_RDONLY)
    source_engine.prepare(uffd)
    start = libc.mmap(None, 4 * PAGE, 3, 0x22, -1, 0)
    ctypes.memset(start, 1, 4 * PAGE)
    sent = source_engine.Sent()

    def written() -> bytes:
        found = source_engine.Regions()
        ranges = [(start, start + 4 * PAGE)]
        source_engine.scan_written(pagemap, uffd, ranges, False, sent, found)
        return bytes(found.runs())

    try:
        assert written() == struct.pack("<QQ", start, 4)
        assert written() == b""
        ctypes.memset(start, 2, 1)
        droppable = libc.mmap(ctypes.c_void_p(start + 3 * PAGE), PAGE, 3, 0x38, -1, 0)
        assert droppable == start + 3 * PAGE
        assert written() == struct.pack("<QQ", start, 3)
    finally:
        libc.munmap(ctypes.c_void_p(start), 4 * PAGE)
        os.close(uffd)
        os.close(pagemap)
