# SPDX-License-Identifier: Apache-2.0
"""What the source sends of the memory of real processes, held against those processes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from captured import as_root
from memory_subject import MANY, Subject, family, subject
from page_chunks import DATA, PAGE, REFERENCE, ZERO, Pages

from liveshift.criu_glue.memory.tracker import MemoryTracker, Standstill

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
