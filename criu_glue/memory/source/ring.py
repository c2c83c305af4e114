# SPDX-License-Identifier: Apache-2.0
"""Memory for chunks that are on their way. A chunk's memory is used again once it is released."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from ..engine import CHUNK

LOOK_S = 0.05
"""A thread that waits for memory checks this often whether it must stop waiting."""

_POPULATE = 0x8000  # MAP_POPULATE, so that there are no page faults later


class ChunkSlot:
    """The memory of one chunk until :meth:`release`. Any thread may release it, also twice."""

    def __init__(self, ring: ChunkRing, memory: memoryview) -> None:
        self._ring: ChunkRing | None = ring
        self.memory = memory

    def release(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.put_back(self.memory)


class ChunkRing:
    """Page-aligned memory for ``slots`` chunks."""

    def __init__(self, slots: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE
        self._memory: mmap.mmap | None = mmap.mmap(-1, slots * CHUNK, flags=flags)
        memory = memoryview(self._memory)
        self._slots = slots
        self._free = [memory[i * CHUNK : (i + 1) * CHUNK] for i in range(slots)]
        self._closed = False
        self._changed = threading.Condition()

    def next_slot(self, stopped: Callable[[], bool]) -> ChunkSlot | None:
        """Wait for a free slot and return it; None once ``stopped`` is true or after close."""
        with self._changed:
            while not self._free:
                if self._closed or stopped():
                    return None
                self._changed.wait(LOOK_S)
            return ChunkSlot(self, self._free.pop())

    def wait_all_free(self, stopped: Callable[[], bool]) -> bool:
        """Wait until all slots are free; False once ``stopped`` is true or after close."""
        with self._changed:
            while len(self._free) < self._slots:
                if self._closed or stopped():
                    return False
                self._changed.wait(LOOK_S)
        return True

    def put_back(self, memory: memoryview) -> None:
        with self._changed:
            if not self._closed:
                self._free.append(memory)
            self._changed.notify_all()

    def rest(self) -> None:
        """Give the memory back to the kernel until a slot is used again. Does nothing while a slot
        is taken."""
        with self._changed:
            if self._memory is not None and len(self._free) == self._slots:
                self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give the memory back once all slots are released. No slot can be taken after this.

        The objects of a move refer to each other. Without this call they would keep the memory
        until Python's garbage collector runs."""
        with self._changed:
            self._closed = True
            self._memory = None
            self._free.clear()
            self._changed.notify_all()
