# SPDX-License-Identifier: Apache-2.0
"""E1: the driver's own checkpoint of a process that holds 1, 10 and 40 GiB: seconds and GB/s.

By the resident helper, and at the smallest size also by one process per action, each of which
initialises the driver anew. The driver copies device memory into the process's host memory.
"""

from __future__ import annotations

import time

from liveshift.cuda_snapshot.helper.client import GpuHelper

from .child import Child, WorkerFailed
from .resident import settled_helper
from .step import GIB, CannotRun, Step

SIZES = (1, 10, 40)
ACTIONS = ("lock", "checkpoint", "restore", "unlock")
LOCK_S = 20.0
HEADROOM = 8 * GIB
"""Of host memory, beside what the driver copies there."""


def sizes(step: Step) -> tuple[int, ...]:
    return SIZES[:2] if step.short else SIZES


def label(step: Step, count: int) -> str:
    return f"{count} × {step.unit >> 20} MiB" if step.simulated else f"{count} GiB"


def measure(step: Step) -> None:
    machine = step.machine
    if machine.gpu_free_bytes < step.unit:
        raise CannotRun(f"the GPU has {machine.gpu_free_bytes / GIB:.1f} GiB free")
    helper, _ = settled_helper(step)
    step.begin()
    for count in sizes(step):
        size, name = count * step.unit, label(step, count)
        if not step.simulated and size + HEADROOM > machine.ram_bytes:
            step.remark(f"{name}: the driver's copy does not fit into this machine's memory")
            continue
        try:
            _resident(step, helper, name, size)
        except WorkerFailed as failed:
            step.check(False, f"{name}: {failed}")
    _one_by_one(step, label(step, SIZES[0]), SIZES[0] * step.unit)


def _resident(step: Step, helper: GpuHelper, name: str, size: int) -> None:
    with Child("hold", size, log=step.work) as child:
        step.figure(f"{name}/process", child.answer(120)["with"])
        took = {}
        began = time.perf_counter()
        for action in ACTIONS:
            since = time.perf_counter()
            if action == "lock":
                helper.lock(child.pid, LOCK_S)
            elif action == "checkpoint":
                helper.checkpoint(child.pid)
                used = sum(helper.used(child.pid).values())
                step.check(used == 0, f"{name}: {used} bytes are still on the GPU when it is saved")
            elif action == "restore":
                helper.restore(child.pid, [])
            else:
                helper.unlock(child.pid)
            took[action] = time.perf_counter() - since
            step.figure(f"{name}/{action}_s", took[action])
        step.figure(f"{name}/frozen_s", time.perf_counter() - began)
        for action in ("checkpoint", "restore"):
            step.figure(f"{name}/{action}_GBps", size / 1e9 / took[action])
        intact = child.ask("check", 120)
        step.check(intact, f"{name}: the bytes are not those of before")
        step.figure(f"{name}/bytes_intact", intact)


def _one_by_one(step: Step, name: str, size: int) -> None:
    """A process for each action, as a command per action would be."""
    with Child("hold", size, log=step.work) as child:
        child.answer(120)
        began = time.perf_counter()
        for action in ACTIONS:
            since = time.perf_counter()
            with Child("outside", log=step.work) as caller:
                step.figure(f"{name}, a process per action/init_s", caller.answer(60)["init_s"])
                told = caller.ask([action.capitalize(), child.pid], 90)
            step.check(told["result"] == 0, f"{action} by a process of its own gave {told}")
            step.figure(f"{name}, a process per action/{action}_s", time.perf_counter() - since)
        step.figure(f"{name}, a process per action/frozen_s", time.perf_counter() - began)
        step.check(child.ask("check", 120), f"{name}, by processes: other bytes than before")
