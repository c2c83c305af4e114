# SPDX-License-Identifier: Apache-2.0
"""Gives memory that a daemon has freed back to the kernel.

malloc keeps freed memory. After some moves an agent held up to 400 MB that it did not use. Half of
that was not even free: objects of past moves referred to each other, and with them to the memory of
their chunks (criu_glue/memory/source/ring.py). Python collects such old cycles only after many more
objects have come.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable

ARENAS, KEEP, MAP = 1, 8 << 20, 4 << 20
"""A daemon has so many heaps. By default there are eight for each core, and what one thread has
freed in its heap is no use to the others: with a snapshot every two seconds an agent kept 500 MB on
two cores. malloc_trim gives back the free end of the main heap only (glibc: malloc/malloc.c,
mtrim): with four heaps an agent at rest had 40 to 200 MB too much after an hour. One is as fast
(``MALLOC_ARENA_MAX=1 make bench-engine``), as chunks are large. It keeps up to KEEP bytes at its
end, and blocks of MAP bytes and more lie outside: else malloc raises both limits by itself, up to
64 MB. An agent keeps more from its first image on, until it is idle (wire/page_port.py)."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h: M_…

EVERY_S, LOOK_S, MOST_S = 10.0, 0.25, 60.0
"""A daemon gives memory back at its first idle moment EVERY_S seconds after the last time; it looks
for one every LOOK_S seconds. One that is never idle, because it holds the snapshots of many jobs,
does it after MOST_S seconds all the same."""


def bound() -> None:
    """Bound what malloc keeps of freed memory; call it before the first thread starts. A malloc
    that is not glibc's has other limits."""
    options = ((_ARENA_MAX, ARENAS), (_TRIM_THRESHOLD, KEEP), (_MMAP_THRESHOLD, MAP))
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in options:
            mallopt(option, value)


async def give_back(idle: Callable[[], bool], every: float = EVERY_S, most: float = MOST_S) -> None:
    """Every ``every`` seconds, while the daemon is ``idle``, collect cycles of unused objects and
    let malloc give back what is free; after ``most`` seconds also if it is not idle. A malloc that
    is not glibc's keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    gc.freeze()  # collections skip the objects of the start: these would take 100 ms
    last = time.monotonic()
    while True:
        await asyncio.sleep(min(every, LOOK_S))
        waited = time.monotonic() - last
        if waited >= every and (idle() or waited >= most):
            gc.collect()
            if trim is not None:
                await asyncio.to_thread(trim, 0)
            last = time.monotonic()
