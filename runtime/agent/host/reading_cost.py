# SPDX-License-Identifier: Apache-2.0
"""How much CPU time of this agent pre-copy takes per byte, over all threads of the agent.

These are the threads that read and compare, that compress with zstd if the link is slow, that
encrypt, and those of libzmq. The CPU time is not divided by thread or by move: all bytes that all
moves read are compared with all CPU time used meanwhile. Other work of an agent costs little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BYTES_PER_CPU_SECOND = 1e9
"""The assumed bytes that a core reads, compares, encrypts and sends per CPU second, until the agent
has measured the cost."""

DEAREST = 20e-9
"""The upper limit, in CPU seconds per byte: even zstd on a slow core takes less. More CPU time went
into other work, such as the freeze of another move, and would distort the mean for long."""

LOOK = 8 << 20
"""Bytes between two reads of the CPU time. The CPU time of running threads is late by a tick."""

FADES = 32 << 20
"""The weight of the earlier measurements, in bytes read. It is large because the agent compresses,
encrypts and sends bytes after it has read them: up to 48 MiB may wait for that (tracker.SLOTS)."""

IDLE_S = 2.0
"""A reader that has read nothing for this long is idle; CPU time of a pause of all is dropped."""


class ReadingCost:
    """The running mean; any thread may count. ``cpu`` returns the CPU seconds used so far."""

    def __init__(self, cpu: Callable[[], float] = time.process_time) -> None:
        self.per_byte = 1 / BYTES_PER_CPU_SECOND
        """CPU seconds per byte that pre-copy reads."""
        self._cpu = cpu
        self._lock = threading.Lock()
        self._used = cpu()  # CPU seconds at the last look
        self._read = 0  # bytes read since the last look
        self._last: dict[int, float] = {}  # when each reader last read

    def count(self, reader: int, read: int, now: float) -> int:
        """Add ``read`` bytes of ``reader`` at ``now`` (monotonic s); return the active readers."""
        with self._lock:
            self._last = {who: at for who, at in self._last.items() if now - at < IDLE_S}
            if not self._last:  # after a pause
                self._used, self._read = self._cpu(), 0
            else:
                self._read += read
            self._last[reader] = now
            if self._read >= LOOK:
                self._update_cost()
            return len(self._last)

    def _update_cost(self) -> None:
        used = self._cpu()
        spent = min(max(0.0, used - self._used), DEAREST * self._read)
        self.per_byte = (FADES * self.per_byte + spent) / (FADES + self._read)
        self._used, self._read = used, 0


OF_THIS_AGENT = ReadingCost()
"""The cost for this agent. It outlives a move: the next move begins with the last measurement."""
