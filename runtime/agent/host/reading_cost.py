# SPDX-License-Identifier: Apache-2.0
"""What a byte of memory that goes ahead costs this agent, in CPU time of all its threads.

Those that read and compare, zstd where the link is slow, the one that seals, libzmq's. Which of
them did how much for which move is not told apart: what all moves read is held against all that was
used meanwhile. What else an agent does is little beside that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BYTES_PER_CPU_SECOND = 1e9
"""About what a core reads, compares, encrypts and sends, as long as nothing was measured."""

DEAREST = 20e-9
"""CPU seconds a byte: zstd on a slow core takes less. More of it went into something else, such as
the standstill of another move, and would be long remembered."""

LOOK = 8 << 20
"""Bytes between two looks at the CPU time, which is late by a tick for threads that run now."""

FADES = 32 << 20
"""Bytes: so much was read before counts as much as what is read now. What was read is compressed,
sealed and sent later: 48 MiB may wait for that (tracker.SLOTS)."""

IDLE_S = 2.0
"""Who has read nothing for so long is not at it, and CPU time of such a pause not for reading."""


class ReadingCost:
    """``cpu``: seconds that were used so far. Any thread may count; ``now``: monotonic seconds."""

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.per_byte = 1 / BYTES_PER_CPU_SECOND
        """CPU seconds."""
        self._cpu = cpu
        self._lock = threading.Lock()
        self._used = cpu()  # at the last look
        self._read = 0  # bytes since then
        self._last: dict[int, float] = {}  # when each reader last read

    def count(self, reader: int, read: int, now: float) -> int:
        """``reader`` has read so many bytes; returns how many readers are at it now."""
        with self._lock:
            self._last = {who: at for who, at in self._last.items() if now - at < IDLE_S}
            if not self._last:  # after a pause
                self._used, self._read = self._cpu(), 0
            else:
                self._read += read
            self._last[reader] = now
            if self._read >= LOOK:
                self._look()
            return len(self._last)

    def _look(self) -> None:
        used = self._cpu()
        spent = min(max(0.0, used - self._used), DEAREST * self._read)
        self.per_byte = (FADES * self.per_byte + spent) / (FADES + self._read)
        self._used, self._read = used, 0


OF_THIS_AGENT = ReadingCost()
"""It outlives a move: the next one begins with what the last one found."""
