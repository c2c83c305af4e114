# SPDX-License-Identifier: Apache-2.0
"""Real trees of whose memory the cold part is in place before CRIU is told to restore them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import memory_parts
import pytest
from captured import Sink, as_root, sink, until
from memory_parts import DATA, PAGE, ZEROS
from room_trees import Rooms, count, criu, goes_on, place, rooms, said, states
from test_memory_fill import Scene

from liveshift.criu_glue import early, output
from liveshift.criu_glue.early import EarlyCriu
from liveshift.criu_glue.memory import prefill
from liveshift.criu_glue.memory.fill import Filled, FillEngine
from liveshift.criu_glue.memory.mapped import PrefillLost
from liveshift.criu_glue.memory.prefill import SPARE, Prefill
from liveshift.criu_glue.memory.store import INDEX_FILE, PAGES_FILE, MemoryStore
from liveshift.criu_glue.memory.tree_memory import UNFILLED
from liveshift.criu_glue.restore import RestoringTree
from liveshift.criu_glue.survey import inner_pid, tasks
from liveshift.criu_glue.tool import Criu
from liveshift.errors import StepFailed

__all__ = ["criu", "place", "rooms", "sink"]

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


class Stage:
    """A tree that was dumped, a room for it and a store with its pages, some of them old."""

    def __init__(self, scene: Scene, program: str) -> None:
        self.scene = scene
        self.parted = scene.part(program)
        self.flags = _flags(task.pid for task in tasks(self.parted.here))
        self.there = scene.rooms.empty()
        self.parted.bring_files(self.there)
        self.tree: RestoringTree | None = None
        memory = self.parted.memory
        size = sum(len(pages) for pages in memory.values()) * PAGE + (4 << 20)
        self.store = MemoryStore.create(self.parted.images, size)
        self.early = EarlyCriu(scene.criu, self.there, self.parted.images, self.store)
        for pid, pages in memory.items():
            old = {
                at: b"old!" * 1024 if at // PAGE % 700 < 3 else page for at, page in pages.items()
            }
            for chunk in memory_parts.chunks(pid, old):
                self.store.write(chunk)
            # What is no longer there at the standstill: beside pages that are.
            for at in [at for at in pages if at + PAGE not in pages][:200]:
                self.store.write(memory_parts.chunk(pid, [(at + PAGE, 1, DATA)], b"gone" * 1024))

    def put_in_place(self) -> None:
        self.early.begin()
        seen = -1

        def settled() -> bool:
            nonlocal seen
            before, seen = seen, self.early.bytes
            time.sleep(0.2)
            return bool(self.early.why) or seen == before > 120 << 20

        until(settled, 60)
        assert self.early.why == ""

    def send_the_rest(self) -> None:
        for pid, pages in self.parted.memory.items():
            for at, page in pages.items():
                if at // PAGE % 700 < 3:
                    self.store.write(memory_parts.chunk(pid, [(at, 1, DATA)], page, round_=1))
        self.store.end(memory_parts.table(self.parted.memory))

    def send_again(self) -> None:
        """All of it, once the tree stands still."""
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


def _flags(processes: Iterable[int]) -> dict[tuple[int, str], tuple[str, ...]]:
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


def _size(where: str) -> int:
    start, end = where.split()[0].split("-")
    return int(end, 16) - int(start, 16)


@pytest.fixture
def scene(criu: Criu, rooms: Rooms, place: Path, sink: Sink) -> Scene:
    return Scene(criu, rooms, place, sink)


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


def _restore(
    stage: Stage, *, post_copy: bool = False, stopped: bool = False, spend: bool = False
) -> tuple[RestoringTree, Filled]:
    stage.tree = tree = RestoringTree(stage.there, stage.parted.images)
    assert stage.early.prepare(), stage.early.why
    engine = FillEngine(
        stage.parted.images, stage.store, plan=stage.early.plan, post_copy=post_copy, spend=spend
    )
    began = time.monotonic()
    tree.bring_up(
        stage.scene.criu, stage.parted.pipes, 60, stopped=stopped, fill=engine, early=stage.early
    )
    seen = engine.seen()
    print(f"restored in {time.monotonic() - began:.3f} s: {seen}")
    return tree, seen


def _is_whole_and_goes_on(stage: Stage, tree: RestoringTree, pages: int) -> None:
    """Every page is right, more than ``pages`` of them are there, and the program finds it so."""
    assert stage.compare() > pages
    tree.let_run(60)
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""


def _restore_plainly(stage: Stage) -> None:
    stage.tree = RestoringTree(stage.there, stage.parted.images)
    engine = FillEngine(stage.parted.images, stage.store)
    stage.tree.bring_up(stage.scene.criu, stage.parted.pipes, 60, fill=engine)
    assert engine.seen().placed == 0
    stage.tree.let_run(60)
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""


def _kill_early(stage: Stage) -> None:
    for pid in stage.early.held.tree().values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not stage.early.held.alive())


@as_root
@pytest.mark.parametrize("program", [ALONE, FAMILY], ids=["alone", "family"])
def test_cold_memory_is_in_place_and_what_is_outdated_is_copied_again(
    staged: Stages, program: str
) -> None:
    stage = staged(program)
    stage.put_in_place()
    assert stage.early.bytes > 100 << 20
    stage.send_the_rest()
    stage.parted.end_source()
    tree, seen = _restore(stage)
    assert seen.placed > 100 << 20
    assert 0 <= stage.early.bytes - seen.placed < 4 << 20, "all but pages of zeros"
    assert seen.placed + seen.bytes == seen.total
    assert seen.placed > seen.total - (16 << 20), "in blocks of which some of it was outdated, too"
    assert stage.compare() > 30000
    restored = _flags(stage.early.held.tree().values())
    both = {where for where in stage.flags if where in restored and where[1].endswith("rw-p")}
    assert {where: restored[where] for where in both} == {w: stage.flags[w] for w in both}
    assert any(_size(where) > 100 << 20 for _, where in both)  # neighbours may have been joined
    assert not tree.resumed()
    tree.let_run(60)
    assert tree.resumed()
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""
    lines = [int(n) for n in said(stage.there).split()]
    assert lines == list(range(len(lines)))


class NoHold:
    def spare_from_exit(self) -> None:
        pass

    def end(self) -> None:
        pass


@as_root
def test_a_tree_with_memory_in_place_stops_at_the_door(staged: Stages) -> None:
    stage = staged(FAMILY)
    stage.bring_over()
    tree, seen = _restore(stage, stopped=True)
    assert seen.placed > 100 << 20
    tree.stop_at_door(60)
    assert (stage.parted.images / "at-door").exists()
    assert not tree.resumed()
    assert states(stage.there) == {"T"}
    waiting = count(stage.there)
    tree.let_run_held(NoHold())
    until(lambda: count(stage.there) > waiting + 3 or not stage.there.alive())
    assert said(stage.there, output.STDERR) == ""


@as_root
def test_a_tree_whose_early_criu_has_gone_is_restored_without(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    _kill_early(stage)
    stage.send_the_rest()
    stage.parted.end_source()
    assert not stage.early.prepare()
    assert stage.early.why == "it has ended"
    _restore_plainly(stage)


@as_root
def test_an_early_criu_that_ends_when_told_to_go_fails_and_another_attempt_succeeds(
    staged: Stages,
) -> None:
    stage = staged(ALONE)
    stage.bring_over()
    prepared = stage.early.prepare

    def prepare() -> bool:
        done = prepared()
        _kill_early(stage)
        return done

    stage.early.prepare = prepare  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match="early CRIU"):
        _restore(stage)
    assert tasks(stage.there) == []
    _restore_plainly(stage)


@as_root
def test_what_is_not_as_the_store_has_it_is_seen_before_the_tree_runs(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.bring_over()
    file = stage.parted.images / PAGES_FILE
    right = file.read_bytes()
    with file.open("r+b") as pages:
        pages.write(bytes(byte ^ 1 for byte in right[:PAGE]) * (len(right) // PAGE))
    with pytest.raises(StepFailed, match="another page was placed"):
        _restore(stage)
    assert tasks(stage.there) == []
    with file.open("r+b") as pages:
        pages.write(right)
    _restore_plainly(stage)


def without_room_for_both(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes to a host that has no memory for what is in place a second time."""
    monkeypatch.setattr(early, "memory_left", lambda: SPARE)  # none for the blocks to come
    stage.put_in_place()
    assert stage.early.lost == ""
    assert stage.kept < 20 << 20, "what is in place is not kept"
    stage.send_the_rest()
    assert stage.store.absent > 100 << 20
    stage.store.save()
    assert not (stage.parted.images / INDEX_FILE).exists(), "nobody may load it"
    with pytest.raises(StepFailed, match="not whole"):
        stage.store.forward(lambda chunk, release: release())


@as_root
@pytest.mark.parametrize("program", [ALONE, FAMILY], ids=["alone", "family"])
def test_a_host_without_memory_for_both_keeps_what_is_in_place_only_there(
    staged: Stages, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    stage = staged(program)
    without_room_for_both(stage, monkeypatch)
    stage.parted.end_source()
    tree, seen = _restore(stage, spend=True)
    assert seen.placed > 100 << 20
    assert stage.kept < seen.total / 40
    _is_whole_and_goes_on(stage, tree, pages=30000)


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


@as_root
def test_what_no_mapping_takes_along_is_brought_back_before_the_tree_is_restored(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(NO_RESERVE)
    without_room_for_both(stage, monkeypatch)
    before = stage.store.absent
    stage.parted.end_source()
    tree, seen = _restore(stage, spend=True)
    assert before - stage.store.absent > 60 << 20
    assert seen.bytes > 60 << 20
    _is_whole_and_goes_on(stage, tree, pages=50000)


@as_root
def test_what_a_child_takes_over_from_its_parent_is_brought_back(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half that each has written is its own; nothing is put in place there for it."""
    stage = staged(ALIKE)
    without_room_for_both(stage, monkeypatch)
    before = stage.store.absent
    stage.parted.end_source()
    tree, seen = _restore(stage, spend=True)
    assert before - stage.store.absent > 60 << 20
    assert seen.placed > 100 << 20, "the parent's"
    assert seen.bytes > 180 << 20, "the children's"
    _is_whole_and_goes_on(stage, tree, pages=50000)


@as_root
def test_all_is_brought_back_when_nothing_can_be_placed(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    without_room_for_both(stage, monkeypatch)
    stage.parted.end_source()

    def rare(*_: object) -> None:
        raise PrefillLost("mm-1001.img has mappings of a rare kind")

    monkeypatch.setattr(prefill, "mapped", rare)
    assert not stage.early.prepare()
    assert "of a rare kind" in stage.early.why
    assert not stage.early.held.alive()
    assert stage.store.absent == 0
    _restore_plainly(stage)


@as_root
def test_a_host_without_memory_for_both_lets_go_of_what_was_written_again(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as it was not copied again."""
    stage = staged(ALONE)
    monkeypatch.setattr(early, "memory_left", lambda: SPARE - 1)
    monkeypatch.setattr(Prefill, "freshen", lambda *_: False)
    stage.put_in_place()
    stage.early.halt()
    stage.send_again()
    until(lambda: stage.early.bytes < 8 << 20, 20)
    stage.store.end(memory_parts.table(stage.parted.memory))
    assert stage.store.absent == 0, "all of it has come again"
    stage.parted.end_source()
    tree, seen = _restore(stage, spend=True)
    assert seen.bytes > 100 << 20
    _is_whole_and_goes_on(stage, tree, pages=30000)


@as_root
def test_what_was_written_again_is_copied_again_and_kept_once_where_memory_is_short(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    stage.early.halt()
    monkeypatch.setattr(early, "memory_left", lambda: SPARE + (16 << 20) - stage.kept)
    stage.send_again()
    until(lambda: stage.kept < 64 << 20, 20)
    stage.store.end(memory_parts.table(stage.parted.memory))
    stage.parted.end_source()
    tree, seen = _restore(stage, spend=True)
    assert seen.placed + seen.bytes == seen.total
    assert seen.placed > 60 << 20, "the new content, in the memory that the old one had"
    _is_whole_and_goes_on(stage, tree, pages=30000)


@as_root
def test_what_lay_only_in_a_criu_that_has_gone_is_missed_and_never_read_as_zeros(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(ALONE)
    without_room_for_both(stage, monkeypatch)
    _kill_early(stage)
    assert stage.early.lost == "it has ended"
    assert not stage.early.prepare()
    stage.parted.end_source()
    stage.tree = RestoringTree(stage.there, stage.parted.images)
    began = time.monotonic()
    with pytest.raises(StepFailed, match="pages lay only in a CRIU that was started early"):
        stage.tree.bring_up(
            stage.scene.criu, stage.parted.pipes, 60,
            fill=FillEngine(stage.parted.images, stage.store),
        )  # fmt: skip
    assert time.monotonic() - began < 20, "CRIU waits for a page, and nobody waits for CRIU"
    assert tasks(stage.there) == []


@as_root
def test_an_early_criu_ends_with_its_agent(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.put_in_place()
    began = stage.early.held.tree()
    assert began
    stage.early.drop()
    assert not stage.early.held.alive()
    assert tasks(stage.there) == []
    stage.send_the_rest()
    stage.parted.end_source()
    _restore_plainly(stage)


@as_root
def test_a_tree_with_memory_in_place_may_run_before_the_rest_is_there(staged: Stages) -> None:
    stage = staged(ALONE)
    stage.bring_over()
    tree, seen = _restore(stage, post_copy=True)
    assert seen.placed > 100 << 20
    tree.let_run(60)
    assert goes_on(stage.there)
    until(lambda: not (stage.parted.images / UNFILLED).exists())
    assert goes_on(stage.there)
    assert said(stage.there, output.STDERR) == ""
