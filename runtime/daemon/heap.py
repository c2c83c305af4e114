# SPDX-License-Identifier: Apache-2.0
"""Memory that a daemon has freed goes back to the kernel.

malloc keeps what it once needed, in a heap for each thread: after some moves an agent had up to
400 MB of its own that it did not use. Half of it was not even free: objects of moves that were over
referred to each other, with the memory for their chunks (memory/ring.py), and Python looks for such
ones of old age only when many more have come.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

EVERY_S = 10.0


async def give_back(idle: Callable[[], bool], every: float = EVERY_S) -> None:
    """Let go of what refers to itself only, and have malloc give back what is free, every so many
    seconds while the daemon is ``idle``; a malloc that cannot (it is not glibc's) keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.freeze()  # what is there by now stays: to look through it each time would take 100 ms
    while True:
        await asyncio.sleep(every)
        if idle():
            gc.collect()
            if trim is not None:
                await asyncio.to_thread(trim, 0)
