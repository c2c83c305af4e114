# SPDX-License-Identifier: Apache-2.0
"""Trees that were dumped, with memory for a CRIU that is started before their image has come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import memory_parts
import pytest
from captured import Sink
from fill_scene import Scene
from memory_parts import DATA, PAGE, ZEROS
from one_sandbox import said
from sandbox_trees import SandboxMaker, goes_on
from waits import until

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.tree import inner_pid, tasks
from liveshift.criu_glue.criu import early
from liveshift.criu_glue.criu.early import EarlyCriu
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.memory.fill.fill import FillEngine, PagesFilled
from liveshift.criu_glue.memory.prefill.prefill import SPARE
from liveshift.criu_glue.memory.store.store import INDEX_FILE, PAGES_FILE, MemoryStore
from liveshift.errors import StepFailed

COLD = """
import mmap, zlib
size = 96 << 20
m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
other = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    m[at : at + 8] = (at * 2654435761 + 1).to_bytes(8, "little")
    if at < len(other):
        other[at + 8 : at + 16] = (at * 2654435761 + 7).to_bytes(8, "little")
sparse = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(sparse) // 2, 4096):
    sparse[at] = 1
def whole():
    return zlib.crc32(sparse, zlib.crc32(other, zlib.crc32(m)))
expected = whole()
"""

ALONE = (
    COLD
    + """
for n in range(10**9):
    assert whole() == expected, "memory has changed"
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""
)

_FAMILY = """
children = []
for child in range(2):
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        for at in range(0, size, 8192):
            m[at + 16 : at + 24] = (at * 31 + child).to_bytes(8, "little")
        own = OWN
        own[:] = bytes([child + 1]) * len(own)
        expected = zlib.crc32(own, whole())
        os.write(done, b".")
        while zlib.crc32(own, whole()) == expected:
            time.sleep(0.01)
        os._exit(3)
    os.read(ready, 1)
    children.append(pid)
for n in range(10**9):
    assert whole() == expected, "memory has changed"
    assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a child's memory has changed"
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""
_MAPPING = "mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
FAMILY = COLD + _FAMILY.replace("OWN", _MAPPING)
ALIKE = COLD + _FAMILY.replace("OWN", "bytearray(16)")
"""The children map nothing that their parent has not: CRIU takes all of it over from there."""


NO_RESERVE = (
    COLD
    + """
arena = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
for at in range(0, len(arena), 4096):
    arena[at : at + 8] = (at * 2654435761 + 3).to_bytes(8, "little")
expected = zlib.crc32(arena, whole())
for n in range(10**9):
    assert zlib.crc32(arena, whole()) == expected, "memory has changed"
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""
)
"""Like the heaps that glibc makes for threads: a kind of mapping that is filled, not placed."""


class WatchedEarlyCriu(EarlyCriu):
    """Says when it has nothing left to do."""

    at_rest = False
    """Whether its last round began when all that had come was cold, and found nothing to place."""

    def _round(self) -> None:
        cold, before = time.monotonic() - self._store.written > early.IDLE_S, self.bytes
        super()._round()
        self.at_rest = cold and self.bytes == before


class Stage:
    """A tree that was dumped, a sandbox for it and a store with its pages, some of them old."""

    def __init__(self, scene: Scene, program: str) -> None:
        self.scene = scene
        self.parted = scene.part(program)
        self.flags = flags_of(task.pid for task in tasks(self.parted.here))
        self.there = scene.new_sandboxes.empty()
        self.parted.bring_files(self.there)
        self.tree: RestoringTree | None = None
        memory = self.parted.memory
        size = sum(len(pages) for pages in memory.values()) * PAGE + (4 << 20)
        self.store = MemoryStore.create(self.parted.images, size)
        self.early = WatchedEarlyCriu(scene.criu, self.there, self.parted.images, self.store)
        for pid, pages in memory.items():
            old = {
                at: b"old!" * 1024 if at // PAGE % 700 < 3 else page for at, page in pages.items()
            }
            for chunk in memory_parts.chunks(pid, old):
                self.store.write(chunk)
            # What is no longer there at the freeze: beside pages that are.
            for at in [at for at in pages if at + PAGE not in pages][:200]:
                self.store.write(memory_parts.chunk(pid, [(at + PAGE, 1, DATA)], b"gone" * 1024))

    def put_in_place(self) -> None:
        """All that is cold, also of what came last; where memory is short the store gives it up."""
        self.early.begin()
        until(lambda: self.early.why or (self.early.at_rest and self.early.bytes > 120 << 20), 60)
        assert self.early.why == ""

    def send_the_rest(self) -> None:
        for pid, pages in self.parted.memory.items():
            for at, page in pages.items():
                if at // PAGE % 700 < 3:
                    self.store.write(memory_parts.chunk(pid, [(at, 1, DATA)], page, round_=1))
        self.store.end(memory_parts.table(self.parted.memory))

    def send_again(self) -> None:
        """All of it, once the tree is frozen."""
        for pid, pages in self.parted.memory.items():
            for chunk in memory_parts.chunks(pid, pages):
                self.store.write(chunk)

    @property
    def kept(self) -> int:
        """Bytes of memory that the store takes."""
        return (self.parted.images / PAGES_FILE).stat().st_blocks * 512

    def bring_over(self) -> None:
        """All of it, what is cold in advance; then the source ends."""
        self.put_in_place()
        self.send_the_rest()
        self.parted.end_source()

    def compare(self) -> int:
        """Every page of every process; how many there were. What differs can only be where the
        kernel says to each of its threads on which processor it is (rseq(2))."""
        pages, differ = 0, []
        there = self.early.held.tree()
        for pid, memory in self.parted.memory.items():
            with open(f"/proc/{there[pid]}/mem", "rb", 0) as file:
                for at, page in memory.items():
                    if page == ZEROS:  # what is zero is not there before it is asked for
                        continue
                    file.seek(at)
                    if (seen := file.read(PAGE)) != page:
                        differ.append(sum(a != b for a, b in zip(seen, page, strict=True)))
                    pages += 1
        assert len(differ) <= len(there), differ
        assert all(many <= 8 for many in differ), differ
        return pages


Stages = Callable[[str], Stage]
"""Makes one of a program."""


def flags_of(processes: Iterable[int]) -> dict[tuple[int, str], tuple[str, ...]]:
    """What the kernel shows of the memory of every process, apart from how much there is."""
    found = {}
    for pid in processes:
        where = ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                where = " ".join(line.split()[:2])
            elif name == "VmFlags:" and "-" in where:
                kept = sorted(set(rest.split()) - {"sd", "um", "uw"})
                found[inner_pid(pid), where] = tuple(kept)
    return found


def size_of(where: str) -> int:
    start, end = where.split()[0].split("-")
    return int(end, 16) - int(start, 16)


@pytest.fixture
def scene(criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> Scene:
    return Scene(criu, new_sandboxes, place, sink)


@pytest.fixture
def staged(scene: Scene) -> Iterator[Stages]:
    made: list[Stage] = []

    def stage(program: str) -> Stage:
        made.append(Stage(scene, program))
        return made[-1]

    yield stage
    for each in made:
        if each.tree is not None:
            each.tree.drop()
        each.early.drop()
        each.store.close()


def restore(
    stage: Stage, *, stopped: bool = False, free_after_copy: bool = False
) -> tuple[RestoringTree, PagesFilled]:
    stage.tree = tree = RestoringTree(stage.there, stage.parted.images)
    assert stage.early.prepare(), stage.early.why
    engine = FillEngine(
        stage.parted.images, stage.store, plan=stage.early.plan, free_after_copy=free_after_copy
    )
    began = time.monotonic()
    tree.bring_up(
        stage.scene.criu, stage.parted.pipes, 60, stopped=stopped, fill=engine, early=stage.early
    )
    seen = engine.seen()
    print(f"restored in {time.monotonic() - began:.3f} s: {seen}")
    return tree, seen


def is_whole_and_goes_on(stage: Stage, tree: RestoringTree, pages: int) -> None:
    """Every page is right, more than ``pages`` of them are there, and the program finds it so."""
    assert stage.compare() > pages
    tree.let_run(60)
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""


def restore_plainly(stage: Stage) -> None:
    stage.tree = RestoringTree(stage.there, stage.parted.images)
    engine = FillEngine(stage.parted.images, stage.store)
    stage.tree.bring_up(stage.scene.criu, stage.parted.pipes, 60, fill=engine)
    assert engine.seen().preplaced == 0
    stage.tree.let_run(60)
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""


def restore_misses_what_is_lost(stage: Stage) -> None:
    """Without the CRIU that had it; nothing of the tree is left then."""
    stage.parted.end_source()
    stage.tree = RestoringTree(stage.there, stage.parted.images)
    engine = FillEngine(stage.parted.images, stage.store)
    began = time.monotonic()
    with pytest.raises(StepFailed, match="pages lay only in a CRIU that was started early"):
        stage.tree.bring_up(stage.scene.criu, stage.parted.pipes, 60, fill=engine)
    assert time.monotonic() - began < 20, "CRIU waits for a page, and nobody waits for CRIU"
    assert tasks(stage.there) == []


def kill_early(stage: Stage) -> None:
    for pid in stage.early.held.tree().values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not stage.early.held.alive())


def without_room_for_both(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes to a host that has no memory for what is in place a second time."""
    monkeypatch.setattr(early, "memory_left", lambda: SPARE)  # none for the blocks to come
    stage.put_in_place()
    assert stage.early.lost == ""
    assert stage.kept < 20 << 20, "what is in place is not kept"
    stage.send_the_rest()
    assert stage.store.lost > 100 << 20
    stage.store.save()
    assert not (stage.parted.images / INDEX_FILE).exists(), "nobody may load it"
    with pytest.raises(StepFailed, match="not whole"):
        stage.store.forward(lambda chunk, release: release())
