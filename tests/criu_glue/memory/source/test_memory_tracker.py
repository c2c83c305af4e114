# SPDX-License-Identifier: Apache-2.0
"""What the source sends of the memory of real processes, held against those processes."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_subject import MANY, Subject, family, state
from page_chunks import DATA, PAGE, REFERENCE, ZERO, Pages
from tracked import finish
from waits import until

from liveshift.criu_glue.memory.source.followed import PART, PARTS, divided
from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.errors import StepFailed

pytestmark = pytest.mark.root


def test_the_first_round_brings_all_and_later_ones_what_was_written(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    first = tracker.round(pages)
    assert (first.processes, first.untracked) == (1, {})
    assert first.dirty_bytes >= first.sent_bytes * 0.9 >= MANY * PAGE * 0.9
    tracker.round(pages)  # when it is idle
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


def test_a_round_that_is_not_worth_it_sends_nothing_and_loses_nothing(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    tracker.round(pages)
    job.do("[put(page, 9) for page in range(100, 300)]")
    before, listed = pages.kinds[DATA], list[int]()

    def refuse(dirty: int) -> None:
        listed.append(dirty)
        raise PullStopped

    with pytest.raises(PullStopped):
        tracker.round(pages, listed=refuse)
    assert 200 * PAGE <= listed[0] < 700 * PAGE
    assert pages.kinds[DATA] == before, "nothing was sent"
    again = tracker.round(pages)
    assert again.dirty_bytes >= 200 * PAGE
    assert pages.kinds[DATA] - before >= 200, "what was listed then comes in the next one"
    job.do("[put(page, 5) for page in range(100, 300)]")
    with pytest.raises(PullStopped):
        tracker.round(pages, listed=refuse)
    assert finish(job, tracker, pages).dirty_bytes >= 200 * PAGE, "or at the freeze"


def test_what_was_never_sent_before_comes_at_the_freeze(
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


def shared_kb(pid: int) -> int:
    """Of anonymous memory that it has in common with another process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(text.split("Shared_Dirty:")[1].split()[0])


def test_what_processes_share_they_share_after_it_was_read(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    """The kernel unshares a page for who pins it, as process_vm_readv does: the job would grow."""
    job.do("child = os.fork() or signal.pause()")
    child = job.number("child")
    before = shared_kb(child)
    assert before > MANY * PAGE / 1024
    tracker.round(pages)
    assert shared_kb(child) > before - 1024
    tracker.round(pages)
    finish(job, tracker, pages, child)
    assert shared_kb(child) > before - 2048


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
    says = 'echo; read x; exec "$@"'
    job.do(f"line = ['sh', '-c', {says!r}, 'sh', sys.executable, '-Sc', {program!r}]")
    job.do("shell = subprocess.Popen(line, stdin=-1, stdout=-1)")
    job.do("shell.stdout.readline()")  # Popen returns when the shell is not yet complete
    shell = job.number("shell.pid")
    assert tracker.round(pages).untracked == {}
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
    assert tracker.count_written() > MANY * PAGE
    job.do("[put(page, 9) for page in range(100)]")
    assert 100 * PAGE <= tracker.count_written() < 600 * PAGE
    tracker.round(pages)
    job.do("put(7, 9)")
    tracker.count_written()
    finish(job, tracker, pages)


def test_what_is_unmapped_while_it_is_read_is_left_out(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("other = libc.mmap(None, 2048 * 4096, 3, 0x22, -1, 0)")
    job.do("ctypes.memset(other, 7, 2048 * 4096)")
    gone: list[str] = []
    one_at_a_time = threading.Lock()

    def unmapping(chunk: memoryview, release: Callable[[], None]) -> None:
        with one_at_a_time:
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
    ended: list[int] = []
    one_at_a_time = threading.Lock()

    def ending(chunk: memoryview, release: Callable[[], None]) -> None:
        with one_at_a_time:
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


def test_a_process_that_ends_at_the_freeze_is_named(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    job.do("child = os.fork() or signal.pause()")
    child = job.number("child")
    with job.standing(child):

        def ending(ranges: object) -> None:
            os.kill(child, signal.SIGKILL)
            until(lambda: state(child) == "Z")

        with pytest.raises(StepFailed, match=rf"memory: .*{child}"):
            tracker.send_final_set(pages, ending)


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
            until(lambda: len(under_way) == 8 - last)  # noqa: B023 - called in this turn only
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
        with pytest.raises(PullStopped):
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


def test_a_round_that_is_not_wanted_ends_though_the_sink_takes_all(
    job: Subject, pages: Pages
) -> None:
    """As lanes do, which seal a chunk, give it back, and wait until the link has room."""
    stopped = threading.Event()
    tracker = MemoryTracker(family(job.pid), stopped=stopped.is_set, threads=1)
    chunks: list[int] = []

    def sink(chunk: memoryview, release: Callable[[], None]) -> None:
        chunks.append(len(chunk))
        pages(chunk, release)
        stopped.set()

    with pytest.raises(PullStopped):
        tracker.round(sink)
    assert len(chunks) == 1
    stopped.clear()
    assert tracker.round(pages).dirty_bytes > 4 * chunks[0], "the rest comes in the next one"
    tracker.close()


def test_a_destination_that_refuses_ends_it_for_good(
    job: Subject, tracker: MemoryTracker, pages: Pages
) -> None:
    def refusing(chunk: memoryview, release: Callable[[], None]) -> None:
        raise StepFailed("ship", "no room")

    with pytest.raises(StepFailed, match="ship: no room"):
        tracker.round(refusing)
    with pytest.raises(StepFailed, match="has lost the record of what it sent"):
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


def test_its_pace_is_told_of_all_that_is_read(job: Subject, tracker: MemoryTracker) -> None:
    read: list[int] = []
    done = tracker.round(Pages(), read.append)
    assert sum(read) == done.dirty_bytes
    assert max(read) <= 5 << 20


@pytest.mark.parametrize("seed", range(20))
def test_what_several_threads_look_at_is_all_of_it_and_nothing_twice(seed: int) -> None:
    chance = random.Random(seed)
    ranges, at = [], 0
    for _ in range(chance.randrange(40)):
        at += PAGE * chance.randrange(1, 10)
        length = PAGE * chance.choice((1, 1 << 16, chance.randrange(1, 200000)))
        ranges.append((at, at + length))
        at += length
    parts = list(divided(ranges))
    joined: list[tuple[int, int]] = []
    for start, end in (pair for part in parts for pair in part if pair[0] < pair[1]):
        assert start % PAGE == end % PAGE == 0
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    assert joined == ranges
    most = max(PART, sum(end - start for start, end in ranges) // PARTS)
    assert all(sum(end - start for start, end in part) <= most for part in parts)
