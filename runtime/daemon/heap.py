# SPDX-License-Identifier: Apache-2.0
"""Gives memory that a daemon has freed back to the kernel.

malloc keeps freed memory, in a heap for each thread. After some moves an agent held up to 400 MB
that it did not use. Half of that was not even free: objects of past moves referred to each other,
and with them to the memory of their chunks (criu_glue/memory/source/ring.py). Python collects such
old cycles only after many more objects have come.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

EVERY_S = 10.0


async def give_back(idle: Callable[[], bool], every: float = EVERY_S) -> None:
    """Every ``every`` seconds, while the daemon is ``idle``, collect cycles of unused objects and
    let malloc give back what is free. A malloc that is not glibc's keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.freeze()  # collections skip the objects of the start: these would take 100 ms
    while True:
        await asyncio.sleep(every)
        if idle():
            gc.collect()
            if trim is not None:
                await asyncio.to_thread(trim, 0)
