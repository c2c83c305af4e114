# SPDX-License-Identifier: Apache-2.0
"""The fill engine against processes that play CRIU's part: order, faults, events, failures."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from descriptors import no_descriptor_left
from lazy_process import LazyProcess
from memory_parts import DATA, PAGE, ZERO, chunk, packed
from waits import until

from liveshift.criu_glue.memory.fill import fill
from liveshift.criu_glue.memory.fill.fill import FillEngine
from liveshift.criu_glue.memory.store.store import MemoryStore, ProcessTable
from liveshift.errors import StepFailed

PID = 1001


class Stage:
    """Lazy processes of ``pages`` each, whose page n holds n + 1 (see ``store``), and an engine."""

    def __init__(self, images: Path, held: ExitStack) -> None:
        self.images = images
        self._held = held

    def process(self, pages: int) -> LazyProcess:
        made = LazyProcess(pages)
        self._held.callback(made.end)
        return made

    def store(self, places: dict[int, tuple[int, int]], zeros: int = 0) -> MemoryStore:
        """By pid: the address of pages, and how many; then so many zero pages."""
        limit = sum(pages + zeros for _, pages in places.values()) * PAGE
        store = MemoryStore.create(self.images, limit)
        self._held.callback(store.close)
        for pid, (base, pages) in places.items():
            for first in range(0, pages, 255):
                count = min(255, pages - first)
                payload = b"".join(
                    struct.pack("<Q", n + 1).ljust(PAGE, b"\1") for n in range(first, first + count)
                )
                store.write(chunk(pid, [(base + first * PAGE, count, DATA)], payload))
            if zeros:
                store.write(chunk(pid, [(base + pages * PAGE, zeros, ZERO)]))
        store.end({p: ProcessTable(1, packed([(b, n + zeros)])) for p, (b, n) in places.items()})
        return store

    def engine(self, store: MemoryStore, threads: int = 2) -> FillEngine:
        made = FillEngine(self.images, store, threads)
        self._held.callback(made.close)
        return made


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as held:
        yield Stage(tmp_path, held)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.root
def test_memory_is_filled_as_it_is_registered_and_let_go_at_the_end(stage: Stage) -> None:
    process = stage.process(3000)
    engine = stage.engine(stage.store({PID: (process.base, 2000)}, zeros=500))
    process.connect(stage.images, PID)
    process("lazy.register(0, 1000)")
    process("lazy.register(1000, 2000)")
    filled = engine.wait(soon())
    assert (filled.total, filled.processes) == (2000 * PAGE, 1)
    assert filled.bytes == 2000 * PAGE, "neither zero pages nor those outside the table are copied"
    expected = [*range(1, 2001), *[0] * 1000]
    assert process("lazy.words(0, 2600)") == expected[:2600]
    process("lazy.finish()")
    until(lambda: engine.seen().phase == fill.FINISHED)
    assert process("lazy.words()") == expected


@pytest.mark.root
def test_pages_that_are_there_already_are_left_as_they_are(stage: Stage) -> None:
    process = stage.process(600)
    for n in (0, 5, 6, 7, 599):
        process(f"lazy.set({n}, 77)")
    engine = stage.engine(stage.store({PID: (process.base, 600)}))
    process.connect(stage.images, PID)
    process("lazy.register()")
    engine.wait(soon())
    kept = {0, 5, 6, 7, 599}
    assert process("lazy.words()") == [77 if n in kept else n + 1 for n in range(600)]


@pytest.mark.root
def test_a_fault_does_not_wait_for_its_turn(stage: Stage) -> None:
    """Nothing is registered at first, so nothing is filled; then a page is touched at once."""
    process = stage.process(4000)
    engine = stage.engine(stage.store({PID: (process.base, 3000)}))
    process.connect(stage.images, PID)
    until(lambda: engine.seen().processes == 1)
    touched = process("[lazy.register(), lazy.word(2999), lazy.word(3500), lazy.word(0)][1:]")
    assert touched == [3000, 0, 1]
    engine.wait(soon())
    assert process("lazy.words()") == [*range(1, 3001), *[0] * 1000]


@pytest.mark.root
def test_several_processes_and_a_table_that_one_has_no_part_in(stage: Stage) -> None:
    processes = {PID + n: stage.process(2000) for n in range(3)}
    places = {pid: (p.base, 1500 + pid - PID) for pid, p in processes.items()}
    del places[PID + 2]
    engine = stage.engine(stage.store(places))
    first = processes[PID]
    first.connect(stage.images, PID)
    # CRIU's tasks share one connection; here the first hands the others' descriptors on.
    for pid, other in list(processes.items())[1:]:
        taken = (
            f"[f := os.pidfd_open({other.pid}), __import__('ctypes').CDLL(None).syscall(438, f, "
        )
        first(f"lazy.hand_over({pid}, {taken}{other('lazy.uffd')}, 0)][1])")
    first("lazy.say(-77)")  # a zombie
    for other in processes.values():
        other("lazy.register()")
    assert engine.wait(soon()).processes == 3
    for pid, other in processes.items():
        full = places.get(pid, (0, 0))[1]
        assert other("lazy.words()") == [*range(1, full + 1), *[0] * (2000 - full)]


@pytest.mark.root
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("lazy.say(0)", "CRIU sent the unknown number 0 for a process"),
        ("lazy.say(1 << 24)", "CRIU sent the unknown number 0x1000000 for a process"),
        ("[lazy.say(1002), lazy.say(1003)]", "a descriptor where none was expected"),
        ("lazy.hand_over(1001)", "CRIU sent the descriptor of process 1001 twice"),
        ("lazy.socket.close()", "CRIU gave up before the tree was let go"),
        ("lazy.hand_over(1002, os.open('/dev/null', 0))", "cannot be watched"),
        ("lazy.hand_over(1002, os.eventfd(1))", "cannot be served|cannot be filled"),
    ],
)
def test_what_is_no_restore_is_told(stage: Stage, spoil: str, words: str) -> None:
    process = stage.process(100)
    engine = stage.engine(stage.store({PID: (process.base, 100), PID + 1: (process.base, 100)}))
    process.connect(stage.images, PID)
    process(spoil)
    with pytest.raises(StepFailed, match=words):
        engine.wait(soon())
    assert engine.seen().phase == fill.FAILED


@pytest.mark.root
def test_what_is_not_restored_is_told_and_never_waited_for(stage: Stage) -> None:
    process = stage.process(100)
    places = {PID: (process.base, 50), PID + 1: (process.base, 10)}
    engine = stage.engine(stage.store(places))
    process.connect(stage.images, PID)
    process("lazy.register()")
    with pytest.raises(StepFailed, match="did not restore process 1002, whose table has 10"):
        engine.wait(soon())
    with pytest.raises(StepFailed, match="did not restore process 1002"):
        engine.wait(soon())


@pytest.mark.root
def test_a_page_beyond_what_was_registered_is_told_by_its_address(stage: Stage) -> None:
    process = stage.process(3000)
    engine = stage.engine(stage.store({PID: (process.base, 3000)}), threads=1)
    process.connect(stage.images, PID)
    process("lazy.register(0, 2345)")
    where = f"process 1001: no memory was restored at {process.base + 2345 * PAGE:#x}"
    with pytest.raises(StepFailed, match=where):
        engine.wait(soon())


@pytest.mark.root
def test_a_criu_that_never_comes_is_told(stage: Stage) -> None:
    engine = stage.engine(stage.store({PID: (1 << 30, 10)}))
    with pytest.raises(StepFailed, match="CRIU did not connect to the fill to ask for memory"):
        engine.wait(soon())


@pytest.mark.root
def test_a_process_that_is_killed_meanwhile_is_told(stage: Stage) -> None:
    process, other = stage.process(10), stage.process(10)
    engine = stage.engine(stage.store({PID + 1: (process.base, 10)}))
    other.connect(stage.images, PID)
    other(f"lazy.hand_over({PID + 1}, lazy.taken({process.pid}, {process('lazy.uffd')}))")
    until(lambda: engine.seen().processes == 2)
    process.end()
    with pytest.raises(StepFailed, match="process 1002 ended while its memory was filled"):
        engine.wait(soon())


@pytest.mark.root
def test_the_deadline_holds(stage: Stage) -> None:
    process = stage.process(10)
    engine = stage.engine(stage.store({PID: (process.base, 10)}), threads=0)
    process.connect(stage.images, PID)
    process("lazy.register()")
    with pytest.raises(StepFailed, match=r"0 B of 41\.0 kB of memory were filled in time"):
        engine.wait(time.monotonic() + 0.05)


@pytest.mark.root
def test_criu_can_say_that_it_is_through_when_nobody_listens_any_more(stage: Stage) -> None:
    process = stage.process(10)
    engine = stage.engine(stage.store({PID: (process.base, 10)}))
    process.connect(stage.images, PID)
    process("lazy.register()")
    engine.wait(soon())
    engine.close()  # as the kernel does with an agent that is killed
    process("lazy.say(0x52535446)")
    assert process("lazy.words()") == list(range(1, 11))


@pytest.mark.root
def test_nothing_is_left_open_or_running(stage: Stage) -> None:
    process = stage.process(10)
    store = stage.store({PID: (process.base, 10)})

    def running() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    threads = running()
    for attempt in range(3):
        with no_descriptor_left():
            engine = stage.engine(store)
            if attempt == 0:
                process.connect(stage.images, PID)
                process("lazy.register()")
                engine.wait(soon())
            elif attempt == 1:
                with socket.socket(socket.AF_UNIX) as other:
                    other.connect(str(stage.images / "lazy-pages.socket"))
                    until(lambda: engine.seen().phase == fill.RUNS)  # noqa: B023
            engine.close()
            engine.close()
        until(lambda: running() <= threads)  # one that was joined is there for a moment longer


@pytest.mark.root
@pytest.mark.parametrize(
    "change", ["forked()", "forget(3, 1)", "unmap(3, 1)", "move(0, 2, 8)"], ids=lambda c: c[:4]
)
def test_a_process_that_changes_before_it_is_filled_fails_the_fill(
    stage: Stage, change: str
) -> None:
    process = stage.process(10)
    engine = stage.engine(stage.store({PID: (process.base, 8)}), threads=0)
    process.connect(stage.images, PID)
    process("[lazy.unmap(8, 2), lazy.register(0, 8)]")
    process.begin(f"lazy.{change}")  # which may block: a fill that failed reads nothing
    with pytest.raises(StepFailed, match="process 1001 forked or changed its address space before"):
        engine.wait(soon())


@pytest.mark.root
def test_the_address_space_changes_once_it_is_filled(stage: Stage) -> None:
    """All at once, many times over, while CRIU has not said yet that the tree goes on; content is
    what a model says."""
    pages, block = 20000, 500
    process = stage.process(pages)
    engine = stage.engine(stage.store({PID: (process.base, pages)}))
    process.connect(stage.images, PID)
    process("lazy.register()")
    engine.wait(soon())
    steps = []
    model = list(range(1, pages + 1))

    def blocks(n: int) -> slice:
        return slice(n * block, (n + 1) * block)

    for n in range(39, 4, -5):
        steps.append(f"lazy.forget({n * block}, {block})")
        model[blocks(n)] = [0] * block
        steps.append(f"lazy.unmap({(n - 1) * block}, {block})")
        steps.append(f"lazy.move({(n - 2) * block}, {block}, {(n - 1) * block})")
        model[blocks(n - 1)] = model[blocks(n - 2)]
        steps.append(f"lazy.map({block}, lazy.base + {(n - 2) * block} * 4096)")
        model[blocks(n - 2)] = [0] * block
        steps.append(f"lazy.set({(n - 3) * block + 3}, 99)")
        model[(n - 3) * block + 3] = 99
    steps.append("lazy.in_child('sum(lazy.words())')")
    assert process(f"[{', '.join(steps)}][-1]") == sum(model)
    assert process("lazy.words()") == model
    assert process("lazy.in_child('lazy.words()')") == model


@pytest.mark.root
def test_a_store_that_is_closed_under_a_fill_stays_as_long_as_that(stage: Stage) -> None:
    process = stage.process(10)
    store = stage.store({PID: (process.base, 10)})
    engine = stage.engine(store)
    file = str(stage.images / "memory")
    store.close()
    with pytest.raises(StepFailed, match="was closed"):
        stage.engine(store)
    process.connect(stage.images, PID)
    process("lazy.register()")
    engine.wait(soon())
    assert process("lazy.words()") == list(range(1, 11))
    assert file in Path("/proc/self/maps").read_text()
    engine.close()
    assert file not in Path("/proc/self/maps").read_text()


def test_a_fill_that_cannot_begin_says_why_and_keeps_no_descriptor(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """epoll refuses a regular file, which stands in for a listener that cannot be watched."""
    store = stage.store({PID: (0x10000, 10)})
    file = stage.images / "no-listener"
    file.write_bytes(b"")
    monkeypatch.setattr(fill, "_listen", lambda _: os.open(file, os.O_RDONLY | os.O_CLOEXEC))
    why = "cannot be watched: Operation not permitted"
    with no_descriptor_left(), pytest.raises(StepFailed, match=why):
        FillEngine(stage.images, store)
