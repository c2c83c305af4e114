# SPDX-License-Identifier: Apache-2.0
"""Memory that a daemon has freed goes back to the kernel.

malloc keeps what it once needed, in a heap for each thread: after some moves an agent had up to
400 MB of its own that it did not use.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

EVERY_S = 10.0


async def give_back(idle: Callable[[], bool], every: float = EVERY_S) -> None:
    """Have malloc give back what is free, every so many seconds while the daemon is ``idle``;
    where malloc cannot (it is not glibc's), nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(every)
        if idle():
            await asyncio.to_thread(trim, 0)
