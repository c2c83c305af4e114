# SPDX-License-Identifier: Apache-2.0
"""The gates of a job that are closed on this host (gate_handlers.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ...errors import NotFound
from ...interposer.orders import OrderedPage
from ..quiesce.host_gate import GateObstacle, HostGate

T = TypeVar("T")


@dataclass
class ClosedGates:
    """A job's gates, closed for one attempt; ``until`` is on the monotonic clock.

    Access ``gate`` and ``pids`` only through :meth:`use`: a look at a job's pages may take long if
    its user wants that, and the pages must stay open meanwhile. Each job has a thread of its own
    for that. So its signs of life wait neither for another job nor for a thread of the agent, which
    images that are saved or compared may all have taken.
    """

    attempt: int
    gate: HostGate
    pids: dict[OrderedPage, int]  # of the pages' processes, as the host sees them
    until: float
    unreadable: dict[Path, GateObstacle]
    version: int = 0
    arrived: bool = False  # they came closed with a capsule, and nothing is armed here
    released: bool = False
    kept: bool = False  # whether they are being given a sign of life
    using: asyncio.Lock = field(default_factory=asyncio.Lock)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gates"))

    async def use(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the gate, in its thread; raises NotFound if the attempt is over."""
        async with self.using:
            if self.released:
                raise NotFound(f"attempt {self.attempt} is over")
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def release(self) -> None:
        async with self.using:
            self.released = True
            self.gate.release()
            self.thread.shutdown(wait=False)

    def fatal(self) -> list[str]:
        """Why this attempt cannot succeed."""
        found = [o for o in self.gate.obstacles() if o.fatal]
        return [str(o) for o in [*self.unreadable.values(), *found]]
