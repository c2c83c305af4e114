# SPDX-License-Identifier: Apache-2.0
"""Real trees whose memory is taken out of CRIU's images and filled in when CRIU restores them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import memory_parts
import pytest
from captured import Sink, sink
from descriptors import no_descriptor_left
from fill_scene import Parted, Scene, stores
from held_tree import hold_tree
from one_sandbox import said
from sandbox_trees import SandboxMaker, count, criu, criu_in, goes_on, new_sandboxes, place, states

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.memory.fill import fill
from liveshift.criu_glue.memory.fill.fill import FillEngine
from liveshift.criu_glue.memory.fill.tree_memory import UNFILLED
from liveshift.criu_glue.memory.store.store import INDEX_FILE, PAGES_FILE, MemoryStore
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink", "stores"]

CHECKED = """
import mmap, zlib, random
size = 48 << 20
m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    if at // 4096 % 7:
        m[at : at + 8] = (at * 2654435761).to_bytes(8, "little")
def whole():
    return zlib.crc32(m)
expected = whole()
for n in range(10**9):
    assert whole() == expected, "memory has changed"
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""


FORKED = """
import mmap, signal, zlib
size = 24 << 20
m = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 4096):
    m[at : at + 8] = (at * 2654435761).to_bytes(8, "little")
shared = mmap.mmap(-1, 4096)
pipes = [os.pipe() for _ in range(6)]
ready = os.pipe()
def other(n):
    own = bytearray(os.urandom(3 << 20))
    m[n * 4096 : n * 4096 + 8] = b"mine %03d" % n
    threads = [threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(3)]
    [t.start() for t in threads]
    expected = zlib.crc32(own), zlib.crc32(m)
    os.write(ready[1], b"r")
    while True:
        shared[n] = (shared[n] + 1) % 256
        assert (zlib.crc32(own), zlib.crc32(m)) == expected
        os.write(pipes[2 * n + 1][1], os.read(pipes[2 * n][0], 1))
for n in range(3):
    if os.fork() == 0:
        try:
            other(n)
        finally:
            os._exit(1)
if os.fork() == 0:  # a zombie
    os._exit(0)
expected = zlib.crc32(m)
for n in range(3):
    os.read(ready[0], 1)
for n in range(10**9):
    for k in range(3):
        os.write(pipes[2 * k][1], b"x")
        assert os.read(pipes[2 * k + 1][0], 1) == b"x"
    assert zlib.crc32(m) == expected
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""


@pytest.fixture
def scene(criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> Scene:
    return Scene(criu, new_sandboxes, place, sink)


def arrive(
    scene: Scene, stores: list[MemoryStore], program: str = CHECKED
) -> tuple[Parted, Sandbox]:
    """Its memory is in a store and its files are in a sandbox; the source has ended."""
    parted = scene.part(program)
    there = scene.new_sandboxes.empty()
    parted.bring_files(there)
    stores.append(memory_parts.keep(parted.memory, parted.images))
    parted.end_source()
    return parted, there


def status_of_killed(agent: Callable[[], object]) -> int:
    """How a process ended (waitpid(2)) that was killed when it had done that, if not before;
    what ``agent`` returns is open until then."""
    child = os.fork()
    if child == 0:
        try:
            _open = agent()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.root
def test_a_tree_gets_its_memory_from_the_store_and_goes_on(scene: Scene) -> None:
    parted = scene.part(CHECKED)
    assert sum(map(len, parted.memory.values())) * 4096 > 40 << 20
    there = scene.new_sandboxes.empty()
    parted.bring_files(there)
    store = memory_parts.keep(parted.memory, parted.images)
    parted.end_source()
    engine = FillEngine(parted.images, store)
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
    seen = engine.seen()
    assert seen.phase == fill.FILLED
    assert seen.bytes == seen.total > 40 << 20
    assert not (parted.images / UNFILLED).exists()
    waiting = count(there)
    time.sleep(0.1)
    assert count(there) == waiting, "it must not run before it may"
    tree.let_run(60)
    assert goes_on(there)
    store.close()
    assert said(there, output.STDERR) == ""
    lines = [int(n) for n in said(there).split()]
    assert lines == list(range(len(lines)))


@pytest.mark.root
def test_a_store_that_is_spent_gives_its_memory_back_and_is_the_last(
    scene: Scene, stores: list[MemoryStore]
) -> None:
    parted, there = arrive(scene, stores, FORKED)
    store, file = stores[0], parted.images / PAGES_FILE
    store.save()
    held = file.stat().st_blocks * 512
    assert held > 20 << 20
    tree = RestoringTree(there, parted.images)
    engine = FillEngine(parted.images, store, free_after_copy=True)
    assert not (parted.images / INDEX_FILE).exists(), "from now on nobody loads it"
    tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
    assert engine.seen().bytes == engine.seen().total > 20 << 20
    assert file.stat().st_blocks * 512 < held / 2  # but for what several processes share
    with pytest.raises(StepFailed, match="used up by an attempt that failed"):
        FillEngine(parted.images, store)
    with pytest.raises(StepFailed, match="not whole"):
        store.forward(lambda chunk, release: release())
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""


@pytest.mark.root
def test_a_page_outside_all_memory_is_told_and_another_attempt_succeeds(
    scene: Scene, stores: list[MemoryStore]
) -> None:
    parted = scene.part(CHECKED)
    there = scene.new_sandboxes.empty()
    parted.bring_files(there)
    wrong = {pid: {**pages, 0x1000: b"x" * 4096} for pid, pages in parted.memory.items()}
    stores.append(memory_parts.keep(wrong, parted.images))
    tree = RestoringTree(there, parted.images)
    with pytest.raises(StepFailed, match=r"no memory was restored at 0x1000"):
        tree.bring_up(scene.criu, parted.pipes, 60, fill=FillEngine(parted.images, stores[0]))
    assert tasks(there) == []
    stores.append(memory_parts.keep(parted.memory, parted.images))
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=FillEngine(parted.images, stores[1]))
    parted.end_source()
    tree.let_run(60)
    assert goes_on(there)


@pytest.mark.root
def test_a_tree_of_several_processes_and_threads(scene: Scene, stores: list[MemoryStore]) -> None:
    parted, there = arrive(scene, stores, FORKED)
    assert len(parted.memory) == 4
    engine = FillEngine(parted.images, stores[0])
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
    assert engine.seen().processes == 4
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""
    assert len(tasks(there)) == 5


@pytest.mark.root
def test_a_tree_that_criu_cannot_restore_leaves_a_sandbox_for_the_next_attempt(
    scene: Scene, stores: list[MemoryStore]
) -> None:
    data = scene.place.parent / "data.bin"
    data.write_bytes(b"0123456789")
    parted = scene.part(f"data = open('{data}')\n{CHECKED}")
    there = scene.new_sandboxes.empty()
    parted.bring_files(there)
    stores.append(memory_parts.keep(parted.memory, parted.images))
    data.rename(data.with_suffix(".away"))
    with no_descriptor_left():
        for _ in range(2):
            tree = RestoringTree(there, parted.images)
            engine = FillEngine(parted.images, stores[0])
            with pytest.raises(StepFailed, match=r"the destination lacks /\S*data\.bin"):
                tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
            assert tasks(there) == []
    data.with_suffix(".away").rename(data)
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=FillEngine(parted.images, stores[0]))
    parted.end_source()
    tree.let_run(60)
    assert goes_on(there)


@pytest.mark.root
def test_a_tree_that_is_left_stopped_has_its_memory(
    scene: Scene, stores: list[MemoryStore]
) -> None:
    parted, there = arrive(scene, stores)
    tree = RestoringTree(there, parted.images)
    engine = FillEngine(parted.images, stores[0])
    tree.bring_up(scene.criu, parted.pipes, 60, stopped=True, fill=engine)
    tree.stop_at_door(60)
    assert states(there) == {"T"}
    tree.let_run_held(hold_tree(there, lambda _: ()))
    assert goes_on(there)
    assert said(there, output.STDERR) == ""


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.root
def test_an_agent_that_is_killed_meanwhile(
    scene: Scene, stores: list[MemoryStore], filled: bool
) -> None:
    """What was filled runs on the next one's word; what was not never runs, and is done again."""
    parted, there = arrive(scene, stores)
    stores[0].save()

    def agent() -> object:
        tree = RestoringTree(there, parted.images)
        engine = FillEngine(parted.images, MemoryStore.load(parted.images))
        if not filled:
            engine.wait = lambda until: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
        return tree, engine

    assert status_of_killed(agent) == signal.SIGKILL
    assert (parted.images / UNFILLED).exists() is not filled
    tree = RestoringTree(there, parted.images)
    tree.take_up()
    if not filled:
        with pytest.raises(StepFailed, match="its memory was not filled when the agent ended"):
            tree.let_run(60)
        assert tasks(there) == []
        tree = RestoringTree(there, parted.images)
        engine = FillEngine(parted.images, MemoryStore.load(parted.images))
        tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""


@pytest.mark.parametrize("program", [CHECKED, FORKED], ids=["one", "forked"])
@pytest.mark.root
def test_from_a_running_tree_through_the_store_to_a_running_one(
    scene: Scene, stores: list[MemoryStore], program: str
) -> None:
    parted, last = scene.follow(program, stores)
    pages = sum(f.stat().st_size for f in parted.images.glob("pages-*.img"))
    assert pages < 8 << 20, "what was hidden is in the image"
    there = scene.new_sandboxes.empty()
    parted.bring_files(there)
    parted.end_source()
    engine = FillEngine(parted.images, stores[0])
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=engine)
    assert engine.seen().bytes > 20 << 20
    assert engine.seen().processes == len(last.table)
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""


@pytest.mark.root
def test_a_criu_that_is_killed_while_memory_is_filled_is_told_at_once(
    scene: Scene, stores: list[MemoryStore]
) -> None:
    parted, there = arrive(scene, stores)
    tree = RestoringTree(there, parted.images)
    engine = FillEngine(parted.images, stores[0], threads=0)
    waits, wait = threading.Event(), engine.wait
    engine.wait = lambda until: [waits.set(), wait(until)][1]  # type: ignore
    with ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(tree.bring_up, scene.criu, parted.pipes, 60, fill=engine)
        assert waits.wait(60), "CRIU has restored the tree, whose memory does not come"
        began = time.monotonic()
        for pid in criu_in(there):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(StepFailed, match="memory could not be filled: CRIU gave up"):
            restoring.result()
    assert time.monotonic() - began < 20
    assert tasks(there) == []
    tree = RestoringTree(there, parted.images)
    tree.bring_up(scene.criu, parted.pipes, 60, fill=FillEngine(parted.images, stores[0]))
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""
