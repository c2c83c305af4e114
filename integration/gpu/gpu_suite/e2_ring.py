# SPDX-License-Identifier: Apache-2.0
"""E2: device memory through the helper's ring of pinned slots, against the limit of the link.

The limit is what plain copies of 1 GiB of pinned memory reach in this run. Bytes in must be bytes
out.
"""

from __future__ import annotations

import hashlib
import random
import time

from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper

from .child import Child
from .step import MIB, Step

KEY = "suite/1"
BLOCKS = 8
PIECE = 16 * MIB
"""What one write hands over."""
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

    blocks = [Block(index * block, block, step.machine.uuid, ARENA) for index in range(BLOCKS)]
    with GpuHelper.start(step.work, step.machine.driver_folder) as helper:
        helper.create(KEY, blocks)
        try:
            with step.part("content"):  # makes the ring, too, which stays for the next
                _compare(step, helper, block * BLOCKS)
            rates = {"out": 0.0, "in": 0.0}
            for _ in range(1 if step.short else 3):
                for way, copy in (("in", _in), ("out", _out)):
                    rates[way] = max(rates[way], copy(helper, block * BLOCKS))
        finally:
            helper.drop(KEY)
    for way, rate in rates.items():
        step.figure(f"through the ring, GB per s/{way}", rate)
        step.figure(f"share of the link/{way}", rate / limits[way])


def _in(helper: GpuHelper, total: int) -> float:
    """GB/s, with nobody who has to fetch the bytes: what the slots hold goes again."""
    began = time.perf_counter()
    with helper.filler(KEY) as filler:
        left = total
        while left:
            size = min(left, len(filler.space()))
            filler.advance(size)
            left -= size
        filler.finish()
    return total / 1e9 / (time.perf_counter() - began)


def _out(helper: GpuHelper, total: int) -> float:
    """GB/s, with nobody who takes the bytes away."""
    began = time.perf_counter()
    with helper.drain(KEY) as drain:
        assert sum(len(view) for view in drain) == total
    return total / 1e9 / (time.perf_counter() - began)


def _compare(step: Step, helper: GpuHelper, total: int) -> None:
    """Bytes in are bytes out."""
    piece = memoryview(random.Random(5).randbytes(PIECE))
    wanted, found = hashlib.blake2b(), hashlib.blake2b()
    with helper.filler(KEY) as filler:
        for number, at in enumerate(range(0, total, PIECE)):
            # Each piece begins elsewhere, so that slots in another order are other bytes.
            turn = number * 4099 % PIECE
            whole = bytes(piece[turn:]) + bytes(piece[:turn])
            data = memoryview(whole)[: total - at]
            wanted.update(data)
            filler.write(data)
        into = filler.finish()
    with helper.drain(KEY) as drain:
        for view in drain:
            found.update(view)
    step.check(wanted.digest() == found.digest(), "other bytes came out than went in")
    step.figure("content/bytes", into.bytes)
    step.figure("content/the GPU waited for us_s", into.waited_s)
