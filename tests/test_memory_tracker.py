# SPDX-License-Identifier: Apache-2.0
"""What the source sends of the memory of real processes, held against those processes."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from captured import as_root, until
from memory_subject import MANY, Subject, family, state, subject
from page_chunks import DATA, PAGE, REFERENCE, ZERO, Pages

from liveshift.criu_glue.memory.pulling import Stopped
from liveshift.criu_glue.memory.source_engine import Offer
from liveshift.criu_glue.memory.tracker import MemoryTracker, Standstill
from liveshift.errors import StepFailed

pytestmark = as_root


@pytest.fixture
def job() -> Iterator[Subject]:
    with subject() as started:
        yield started


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def tracker(job: Subject) -> Iterator[MemoryTracker]:
    made = MemoryTracker(family(job.pid))
    assert made.probe() == ""
    yield made
    made.close()


def finish(job: Subject, tracker: MemoryTracker, pages: Pages, *others: int) -> Standstill:
    """The last pass; all there is must have come as it is."""
    with job.standing(*others):
        found = tracker.standstill(pages)
        for pid in (job.pid, *others):
            assert pages.differences(pid, pid, found.table) == []
    return found


def test_the_first_round_brings_all_and_later_ones_what_was_written(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    first = tracker.round(pages)
    assert (first.number, first.processes, first.untracked) == (0, 1, {})
    assert first.dirty_bytes >= first.sent_bytes * 0.9 >= MANY * PAGE * 0.9
    idle = tracker.round(pages)
    assert idle.number == 1
    job.do("[put(page, 9) for page in range(100, 300)]")
    before = pages.kinds[DATA]
    third = tracker.round(pages)
    assert 200 <= pages.kinds[DATA] - before < 700
    assert third.dirty_bytes < 700 * PAGE
    assert pages.rounds >= {0, 2}
    job.do("put(1, 77)")
    found = finish(job, tracker, pages)
    assert found.dirty_bytes < 500 * PAGE
    start = job.number("address()")
    assert any(at <= start < end for at, end in found.ranges[job.pid])


def test_what_was_never_sent_before_comes_at_the_standstill(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    assert finish(job, tracker, pages).dirty_bytes > MANY * PAGE


def test_what_is_written_again_as_it_was_and_zeros_cost_nothing(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.round(pages)
    before = pages.kinds.copy()
    job.do("[put(page, page + 1) for page in range(1000)]")
    job.do("[put(page, 0) for page in range(1000, 1500)]")
    again = tracker.round(pages)
    assert again.dirty_bytes > 1500 * PAGE
    assert pages.kinds[ZERO] - before[ZERO] >= 500
    assert pages.kinds[DATA] - before[DATA] < 500
    finish(job, tracker, pages)


def test_memory_comes_and_goes_and_moves(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.round(pages)
    start = job.number("address()")
    job.do("memory.madvise(mmap.MADV_DONTNEED, 0, 512 * 4096)")  # gone, and read as zeros
    job.do("put(3, 5)")  # and some of it is there again
    job.do("other = mmap.mmap(-1, 64 * 4096, flags=PRIVATE)")
    job.do("[put(page, 7, other) for page in range(64)]")
    tracker.round(pages)
    job.do("memory.madvise(mmap.MADV_DONTNEED, 512 * 4096, 256 * 4096)")
    found = finish(job, tracker, pages)
    runs = list(struct.iter_unpack("<QQ", found.table[job.pid]["runs"]))

    def there(address: int) -> bool:
        return any(at <= address < at + pages * PAGE for at, pages in runs)

    assert there(start + 3 * PAGE)
    assert not there(start + 4 * PAGE)
    assert not there(start + 600 * PAGE)


def test_a_mapping_that_took_anothers_place_is_sent_anew(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    """Both were sent before, and nothing was written since: only the address is another."""
    job.do("one = libc.mmap(None, 64 * 4096, 3, 0x22, -1, 0)")
    job.do("two = libc.mmap(None, 64 * 4096, 3, 0x22, -1, 0)")
    job.do("ctypes.memset(one, 1, 64 * 4096), ctypes.memset(two, 2, 64 * 4096)")
    tracker.round(pages)
    tracker.round(pages)
    move = "libc.mremap(ctypes.c_void_p({}), 64 * 4096, 64 * 4096, 3, ctypes.c_void_p({}))"
    assert job.do(f"{move.format('two', 'one')} == one") == "True"
    tracker.round(pages)
    one = job.number("one")
    assert pages.of[job.pid][one] == b"\x02" * PAGE
    assert job.do("three = libc.mmap(None, 64 * 4096, 3, 0x22, -1, 0)") == "None"
    job.do("ctypes.memset(three, 3, 64 * 4096)")
    tracker.round(pages)
    assert job.do(f"{move.format('three', 'one')} == one") == "True"
    finish(job, tracker, pages)
    assert pages.of[job.pid][one] == b"\x03" * PAGE


def test_a_fork_is_sent_as_references_to_its_parents_pages(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("child = os.fork() or signal.pause()")
    first = tracker.round(pages)
    assert first.processes == 2
    assert pages.kinds[REFERENCE] > MANY
    assert first.sent_bytes < 1.8 * MANY * PAGE
    child = job.number("child")
    job.do("put(5, 5)")
    job.do("second = os.fork() or signal.pause()")
    found = finish(job, tracker, pages, child, job.number("second"))
    assert set(found.table) == {job.pid, child, job.number("second")}
    assert pages.kinds[DATA] < 2 * MANY + 1000


def test_processes_end_begin_and_run_other_programs(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("child = os.fork() or signal.pause()")
    tracker.round(pages)
    job.do("os.kill(child, 9)")  # and stays a zombie
    tracker.round(pages)
    job.do("os.waitpid(child, 0)[0]")
    tracker.round(pages)
    program = "import sys; kept = bytearray(b'x' * 9000000); print(1, flush=True); sys.stdin.read()"
    job.do("import subprocess")
    job.do(f"line = ['sh', '-c', 'read x; exec \"$@\"', 'sh', sys.executable, '-Sc', {program!r}]")
    job.do("shell = subprocess.Popen(line, stdin=-1, stdout=-1)")
    shell = job.number("shell.pid")
    tracker.round(pages)
    assert pages.incarnations[shell] == 1
    job.do("shell.stdin.write(b'\\n'), shell.stdin.flush(), shell.stdout.readline()")
    after = tracker.round(pages)
    assert after.processes == 2
    assert after.untracked == {}
    assert pages.incarnations[shell] == 2
    found = finish(job, tracker, pages, shell)
    assert found.table[shell]["incarnation"] == 2


def test_a_process_that_is_not_trusted_is_read_again(job: Subject, pages: Pages) -> None:
    """A device writes past the page tables; here nothing does, and so nothing is sent twice."""
    tracker = MemoryTracker(family(job.pid), compare=lambda pid: pid == job.pid)
    tracker.round(pages)
    before = pages.kinds[DATA]
    found = finish(job, tracker, pages)
    assert found.dirty_bytes > MANY * PAGE
    assert pages.kinds[DATA] - before < 500
    tracker.close()


def test_nothing_is_left_in_the_process(job: Subject, tracker: MemoryTracker, pages: Pages) -> None:
    before = sorted(os.listdir(f"/proc/{job.pid}/fd"))
    tracker.round(pages)
    assert sorted(os.listdir(f"/proc/{job.pid}/fd")) == before
    tracker.close()
    smaps = job.do("open('/proc/self/smaps').read().count(' uw ')")
    assert smaps == "0"


def test_a_look_tells_the_rate_and_loses_nothing(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    assert tracker.look() > MANY * PAGE
    job.do("[put(page, 9) for page in range(100)]")
    assert 100 * PAGE <= tracker.look() < 600 * PAGE
    tracker.round(pages)
    job.do("put(7, 9)")
    tracker.look()
    finish(job, tracker, pages)


def test_what_is_unmapped_while_it_is_read_is_left_out(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("other = libc.mmap(None, 2048 * 4096, 3, 0x22, -1, 0)")
    job.do("ctypes.memset(other, 7, 2048 * 4096)")
    gone = []

    def unmapping(chunk: memoryview, release: Callable[[], None]) -> None:
        if not gone:
            gone.append(job.do("libc.munmap(ctypes.c_void_p(other), 2048 * 4096)"))
            job.do("memory.madvise(mmap.MADV_DONTNEED, 512 * 4096, 1024 * 4096)")
        pages(chunk, release)

    first = tracker.round(unmapping)
    assert gone == ["0"]
    assert first.sent_bytes < 0.9 * 2 * MANY * PAGE
    finish(job, tracker, pages)


def test_a_process_that_ends_while_it_is_read_is_forgotten(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("child = os.fork() or signal.pause()")
    job.do("[put(page, page) for page in range(2000)]")
    child = job.number("child")
    ended = []

    def ending(chunk: memoryview, release: Callable[[], None]) -> None:
        if not ended and struct.unpack_from("<I", chunk, 4) == (child,):
            os.kill(child, signal.SIGKILL)
            until(lambda: state(child) == "Z")
            ended.append(child)
        pages(chunk, release)

    tracker.round(ending)
    assert ended == [child]
    assert tracker.round(pages).processes == 2  # the dead one has no memory
    found = finish(job, tracker, pages)
    assert set(found.table) == {job.pid}


def test_a_process_that_ends_at_the_standstill_is_named(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("child = os.fork() or signal.pause()")
    child = job.number("child")
    with job.standing(child):

        def ending(ranges: object) -> None:
            os.kill(child, signal.SIGKILL)
            until(lambda: state(child) == "Z")

        with pytest.raises(StepFailed, match=rf"memory: .*{child}"):
            tracker.standstill(pages, ending)


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


def test_without_room_it_waits_and_touches_nothing_that_is_under_way(job: Subject) -> None:
    under_way: list[tuple[memoryview, bytes, Callable[[], None]]] = []
    tracker = MemoryTracker(family(job.pid), slots=4, threads=3)
    arrived = threading.Event()

    def keep(chunk: memoryview, release: Callable[[], None]) -> None:
        if arrived.is_set():
            release()
        else:
            under_way.append((chunk, bytes(chunk), release))

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(tracker.round, keep)
        until(lambda: len(under_way) == 4)
        for last in range(3, -1, -1):  # each makes room for one more, and only that
            under_way[last][2]()
            under_way[last][2]()  # said once more it does no harm
            until(lambda last=last: len(under_way) == 8 - last)
            for chunk, content, _ in under_way[:last]:
                assert chunk == content
        arrived.set()
        for *_, release in under_way:
            release()
        assert going.result().sent_bytes > MANY * PAGE
    tracker.close()


def test_a_round_that_is_not_wanted_ends_though_nothing_is_released(
    job: Subject, pages: Pages
) -> None:
    stopped = threading.Event()
    tracker = MemoryTracker(family(job.pid), slots=2, stopped=stopped.is_set)
    pages.held = []
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(tracker.round, pages)
        until(lambda: len(pages.held or []) == 2)
        stopped.set()
        with pytest.raises(Stopped):
            going.result(10)
    held, pages.held = pages.held, None
    for release in held:
        release()
    stopped.clear()
    rest = finish(job, tracker, pages)
    runs = struct.iter_unpack("<QQ", rest.table[job.pid]["runs"])
    there = sum(length for _, length in runs) * PAGE
    assert rest.dirty_bytes < there - (1 << 20), "what has been sent is sent again"
    tracker.close()


def test_a_destination_that_refuses_ends_it_for_good(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    def refusing(chunk: memoryview, release: Callable[[], None]) -> None:
        raise StepFailed("ship", "no room")

    with pytest.raises(StepFailed, match="ship: no room"):
        tracker.round(refusing)
    with pytest.raises(StepFailed, match="not known any more"):
        tracker.round(pages)


def test_pages_are_sent_again_where_they_are_wanted(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.round(pages)
    start = job.number("address()")
    wanted = [start + n * PAGE for n in (1, 2, 3, 9)]
    for address in wanted:
        del pages.of[job.pid][address]
    asked = [(job.pid, start + PAGE, 3), (job.pid, start + 9 * PAGE, 1)]
    assert tracker.again(asked, pages) > 4 * PAGE
    finish(job, tracker, pages)


def test_what_was_never_sent_is_not_sent_for_the_asking(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    assert tracker.again([(job.pid, job.number("address()"), 1)], pages) == 0
    tracker.round(pages)
    before = sum(pages.kinds.values())
    everything = [(job.pid, 0, (1 << 47) // PAGE), (job.pid + 1, 0, 1)]
    assert tracker.again(everything, pages) > MANY * PAGE
    assert sum(pages.kinds.values()) < 2.1 * before
    finish(job, tracker, pages)


def test_what_the_destination_offers_is_only_named_and_sent_where_it_is_wanted(
    job: Subject,
) -> None:
    likeness = [xxhash.xxh3_128_intdigest((n + 1).to_bytes(8, "little") * 512) for n in range(MANY)]
    lower = sorted(each & (1 << 64) - 1 for each in likeness[:1000])
    tracker = MemoryTracker(family(job.pid), offer=struct.pack("<1000Q", *lower))
    pages = Pages()
    pages.offered = set(likeness[:1000])
    done = tracker.round(pages)
    assert done.offered_bytes == 1000 * PAGE
    assert pages.kinds[REFERENCE] == 1000
    assert done.sent_bytes < done.dirty_bytes - 900 * PAGE
    start = job.number("address()")
    assert [pages.of[job.pid][start + n * PAGE] for n in (0, 999)] == [b"", b""]
    assert tracker.again([(job.pid, start, 600)], pages) > 600 * PAGE
    assert tracker.again([(job.pid, start + 600 * PAGE, 400)], pages) > 400 * PAGE
    job.do("put(5, 6 + 400)")
    job.do("put(6, 3)")
    with job.standing():
        last = tracker.standstill(pages)
        assert pages.differences(job.pid, job.pid, last.table) == []
    assert pages.kinds[REFERENCE] == 1000, "at the standstill what is sent is there for certain"
    tracker.close()


@pytest.mark.parametrize("offer", [b"1234567", struct.pack("<2Q", 2, 1), struct.pack("<2Q", 1, 1)])
def test_an_offer_that_is_none_is_refused(offer: bytes) -> None:
    with pytest.raises(StepFailed, match="no ordered hashes"):
        MemoryTracker(list, offer=offer)


def test_every_hash_of_an_offer_is_found_and_no_other() -> None:
    edges = {0, 1, (1 << 52) - 1, 1 << 52, (1 << 64) - 1, (1 << 64) - (1 << 52)}
    rng = random.Random(1)
    hashes = sorted(edges | {rng.getrandbits(64) for _ in range(5000)})
    for some in ([], hashes[:1], hashes[-1:], hashes):
        offer = Offer(struct.pack(f"<{len(some)}Q", *some))
        found = [each for each in {*hashes, *(h ^ 1 for h in hashes)} if offer.has(each)]
        assert sorted(found) == some


def test_its_pace_is_told_of_all_that_is_read(job: Subject, tracker: MemoryTracker) -> None:
    read = []

    class Pace:
        def spent(self, bytes: int) -> None:
            read.append(bytes)

    done = tracker.round(Pages(), Pace())
    assert sum(read) == done.dirty_bytes
    assert max(read) <= 5 << 20


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
