# SPDX-License-Identifier: Apache-2.0
"""Memory for chunks on their way: each is written once, and again only when it is released."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from ..engine import CHUNK

LOOK_S = 0.05
"""How often somebody who waits for memory looks whether it is still wanted."""

_POPULATE = 0x8000  # MAP_POPULATE: no page faults later


class Slot:
    """The memory of one chunk, until :meth:`release` (any thread may, and more than once)."""

    def __init__(self, ring: Ring, memory: memoryview) -> None:
        self._ring: Ring | None = ring
        self.memory = memory

    def release(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.put_back(self.memory)


class Ring:
    """``slots`` chunks of memory, page-aligned."""

    def __init__(self, slots: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE
        memory = memoryview(mmap.mmap(-1, slots * CHUNK, flags=flags))
        self._slots = slots
        self._free = [memory[i * CHUNK : (i + 1) * CHUNK] for i in range(slots)]
        self._closed = False
        self._changed = threading.Condition()

    def take(self, stopped: Callable[[], bool]) -> Slot | None:
        """A slot, once there is a free one; None when it is not wanted any more."""
        with self._changed:
            while not self._free:
                if self._closed or stopped():
                    return None
                self._changed.wait(LOOK_S)
            return Slot(self, self._free.pop())

    def wait_all_free(self, stopped: Callable[[], bool]) -> bool:
        """Until everything was released; False when that is not wanted any more."""
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

    def close(self) -> None:
        """Give the memory back, once all slots were released; no slot is taken any more. Objects of
        a move refer to each other, and would keep it until Python looks for such ones."""
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()
