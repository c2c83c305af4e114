# SPDX-License-Identifier: Apache-2.0
"""E2: device memory through the helper's ring of pinned slots, against the limit of the link.

The limit is what plain copies of 1 GiB of pinned memory reach in this run. Bytes in must be bytes
out.
"""

from __future__ import annotations

import hashlib
import random
import time

from liveshift.cuda_snapshot.helper.calls import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper

from .child import Child
from .step import MIB, Step

KEY = "suite/1"
BLOCKS = 8
PIECE = 16 * MIB
"""What one write hands over: the content repeats after so many bytes."""
ARENA = 15  # layout.Memory.ARENA


def measure(step: Step) -> None:
    step.begin()
    block = 8 * MIB if step.simulated else 1024 * MIB
    with Child("copying", block, 2 if step.short else 5, log=step.work) as child:
        rates = child.answer(60)
    for name, rate in rates.items():
        step.figure(f"plain copies, GB per s/{name}", rate)
    limits = {
        way: max(rate for name, rate in rates.items() if "pinned" in name and name.endswith(way))
        for way in ("out", "in")
    }

    helper = GpuHelper.start(step.work, step.machine.driver_folder)
    blocks = [Block(index * block, block, step.machine.uuid, ARENA) for index in range(BLOCKS)]
    total = block * BLOCKS
    piece = random.Random(5).randbytes(PIECE)
    best = {"out": 0.0, "in": 0.0}
    for _ in range(1 if step.short else 2):  # the first one makes the ring
        helper.create(KEY, blocks)
        try:
            began = time.perf_counter()
            filler = helper.filler(KEY)
            for at in range(0, total, PIECE):
                filler.write(memoryview(piece)[: min(PIECE, total - at)])
            filler.finish()
            best["in"] = max(best["in"], total / 1e9 / (time.perf_counter() - began))
            began = time.perf_counter()
            count = sum(len(view) for view in helper.drain(KEY))
            best["out"] = max(best["out"], total / 1e9 / (time.perf_counter() - began))
            step.check(count == total, f"{total} bytes went in, {count} came out")
            _compare(step, helper, piece, total)
        finally:
            helper.drop(KEY)
    for way, rate in best.items():
        step.figure(f"through the ring, GB per s/{way}", rate)
        step.figure(f"share of the link/{way}", rate / limits[way])


def _compare(step: Step, helper: GpuHelper, piece: bytes, total: int) -> None:
    wanted, found = hashlib.blake2b(), hashlib.blake2b()
    for at in range(0, total, PIECE):
        wanted.update(memoryview(piece)[: min(PIECE, total - at)])
    for view in helper.drain(KEY):
        found.update(view)
    step.check(wanted.digest() == found.digest(), "other bytes came out than went in")
