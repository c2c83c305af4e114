# SPDX-License-Identifier: Apache-2.0
"""E4: the whole fast path at 1, 10 and 40 GiB, by the code that a move runs, without CRIU.

The interposer's memory is given up to the helper, what is left is checkpointed by the driver; the
bytes go through the ring into physical memory made anew, as they do at a destination; the process
is restored and gets that memory at its old addresses; checksums are compared. Frozen all the while:
to be held against the same sizes of E1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from liveshift.criu_glue.capsule import sandboxes
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.interposer.library import library_path
from liveshift.interposer.orders import open_ordered
from liveshift.runtime.agent.gpu.cuda_processes import CudaProcess
from liveshift.runtime.agent.gpu.devices import DeviceTree
from liveshift.runtime.model.stopwatch import Stopwatch

from .child import Child
from .e1_plain import LOCK_S, label, sizes
from .resident import settled_helper
from .step import GIB, Step


class Tree(DeviceTree):
    """One process that is in no capsule; its page lies where a capsule's would, below a folder."""

    child: Child

    def _pids(self, of: Collection[int]) -> list[int]:
        return [self.child.pid] if self.child.pid in of else []

    def _running_parents(self, pid: int) -> list[int]:
        return []

    @contextmanager
    def _processes(self, of: Collection[int] = ()) -> Iterator[list[CudaProcess]]:
        pages = self.resident.sandbox.root / sandboxes.PAGES.lstrip("/")
        directory = os.open(pages, os.O_RDONLY | os.O_DIRECTORY)
        try:
            page = open_ordered(pages / str(self.child.pid), directory)
        finally:
            os.close(directory)
        try:
            yield [CudaProcess(self.child.pid, self.child.pid, page)]
        finally:
            page.open()
            page.close()


def measure(step: Step) -> None:
    step.begin()
    helper, _ = settled_helper(step)
    for count in sizes(step):
        size, name = count * step.unit, label(step, count)
        if 2 * size + 4 * GIB > step.machine.gpu_free_bytes and not step.simulated:
            step.remark(f"{name}: the GPU does not hold it twice")
            continue
        with step.part(name):
            _moved(step, helper, name, size)


def _moved(step: Step, helper: GpuHelper, name: str, size: int) -> None:
    root = step.work / f"sandbox-{size >> 20}"
    pages = root / sandboxes.PAGES.lstrip("/")
    pages.mkdir(parents=True)
    environment = {
        "LD_PRELOAD": str(library_path()),
        "LIVESHIFT_PAGES": str(pages),
        "LIVESHIFT_DEVICE_ARENA": "1",
    }
    with Child("hold", size, log=step.work, env=environment) as child:
        step.figure(f"{name}/process", child.answer(120)["with"])
        here, there = (_tree(root, helper, child, side) for side in ("here", "there"))
        watch = Stopwatch()
        try:
            for tree in (here, there):  # while the job still trains, as a move does
                helper.warm(tree.key(child.pid), [step.machine.uuid])
            began = time.perf_counter()
            here.save(watch)
            step.figure(f"{name}/save_s", time.perf_counter() - began)
            there.saved = here.saved
            handed = sum(saved.bytes for saved in here.saved)
            step.figure(f"{name}/handed over_bytes", handed)
            step.check(handed >= size, f"{name}: only {handed} of {size} bytes went the fast way")
            since = time.perf_counter()
            _copy(helper, here, there)
            took = time.perf_counter() - since
            step.figure(f"{name}/copy_s", took)
            step.figure(f"{name}/copy_GBps", handed / 1e9 / took)
            since = time.perf_counter()
            there.bring_back(watch)
            step.figure(f"{name}/bring_back_s", time.perf_counter() - since)
            step.figure(f"{name}/frozen_s", time.perf_counter() - began)
            for phase in watch.phases:
                step.figure(f"{name}/{phase.name}", phase.detail)
        finally:
            here.drop()
            there.drop()
        intact = child.ask("check", 120)
        step.figure(f"{name}/bytes_intact", intact)
        step.check(intact, f"{name}: the bytes are not those of before")


def _tree(root: Path, helper: GpuHelper, child: Child, migration: str) -> Tree:
    plan = SimpleNamespace(directory=root)
    resident: Any = SimpleNamespace(sandbox=SimpleNamespace(root=root, plan=plan))
    tree = Tree(resident, helper, migration, LOCK_S)
    tree.child = child
    return tree


def _copy(helper: GpuHelper, here: Tree, there: Tree) -> None:
    """From the source's physical memory into a destination's, slot by slot."""
    for saved in here.saved:
        key = there.key(saved.pid)
        helper.create(key, saved.blocks)
        filler = helper.filler(key)
        for view in helper.drain(here.key(saved.pid)):
            filler.write(view)
        filler.finish()
