# SPDX-License-Identifier: Apache-2.0
"""A tree that was dumped without its memory, and is restored with a fill engine beside CRIU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import memory_parts
import msgspec
import pytest
from captured import ROOT_PID, Sink
from one_sandbox import said
from sandbox_trees import SandboxMaker, count, goes_on
from waits import until

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.page_filter import PageFilter
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files import trees, unpacking
from liveshift.criu_glue.memory.source.tracker import FrozenSet, MemoryTracker
from liveshift.criu_glue.memory.store.store import MemoryStore, read_table


@dataclass
class Parted:
    """A tree that was dumped, its memory apart; ``here`` still stands frozen."""

    here: Sandbox
    frozen: FrozenTree
    images: Path
    memory: dict[int, memory_parts.Pages]
    pipes: dict[int, int] = field(default_factory=dict)

    def bring_files(self, there: Sandbox) -> None:
        for name in ("tmp", "dev/shm"):
            tree = trees.Tree(name, self.here.root / name)
            unpacker = unpacking.Unpacker(there.root / name)
            trees.pack(tree, trees.listing(tree), unpacker.write)
            unpacker.finish()
        shutil.copytree(self.here.plan.log, there.plan.log, dirs_exist_ok=True)

    def end_source(self) -> None:
        sandboxes.end(self.here)
        self.frozen.release()


class Scene:
    def __init__(self, criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> None:
        self.criu, self.new_sandboxes, self.place, self.sink = criu, new_sandboxes, place, sink

    def part(self, program: str, lines: int = 3) -> Parted:
        here = self.new_sandboxes.start(program)
        until(lambda: count(here) > lines or not here.alive())
        assert here.alive(), said(here, output.STDERR)
        frozen = FrozenTree(here, ROOT_PID, self.place / "dump")
        frozen.dump(self.criu, self.sink, 60)
        output.settle(here)
        images = self.place / "arrived"
        self.sink.write_to(images)
        memory = memory_parts.part(images)
        return Parted(here, frozen, images, memory, here.pipes())

    def follow(
        self, program: str, stores: list[MemoryStore], rounds: int = 3
    ) -> tuple[Parted, FrozenSet]:
        """The same by the source's own tracker: what it sends comes into the store at once."""
        here = self.new_sandboxes.start(program)
        until(lambda: count(here) > 3 or not here.alive())
        assert here.alive(), said(here, output.STDERR)
        images = self.place / "arrived"
        images.mkdir()
        store = MemoryStore.create(images, 256 << 20)
        stores.append(store)

        def take(chunk: memoryview, release: Callable[[], None]) -> None:
            store.write(chunk)
            release()

        tracker = MemoryTracker(lambda: [task.pid for task in tasks(here)])
        for _ in range(rounds):
            tracker.round(take)
            assert goes_on(here)
        frozen = FrozenTree(here, ROOT_PID, self.place / "dump")
        page_filter = PageFilter(self.place / "dump")
        with ThreadPoolExecutor(1) as pool:
            dump = pool.submit(frozen.dump, self.criu, self.sink, 60, page_filter)
            tracker.wait_frozen(time.monotonic() + 60, page_filter.asked)
            last = tracker.send_final_set(take, page_filter.hide)
            dump.result()
        assert page_filter.asked()
        output.settle(here)
        for name, data in self.sink.images.items():
            (images / name).write_bytes(data)
        if wants := store.wants():
            tracker.again(wants, take)
            assert store.wants() == []
        store.end(read_table(msgspec.msgpack.encode(last.table)))
        tracker.close()
        return Parted(here, frozen, images, {}, here.pipes()), last


@pytest.fixture
def stores() -> Iterator[list[MemoryStore]]:
    opened: list[MemoryStore] = []
    yield opened
    for store in opened:
        store.close()
