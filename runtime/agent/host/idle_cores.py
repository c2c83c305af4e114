# SPDX-License-Identifier: Apache-2.0
"""How many of this host's cores are idle: a copy may use these without slowing a job.

/proc/stat counts how long cores were idle (proc_stat(5)). Where the kernel has PSI,
/proc/pressure/cpu counts how long some task waited for a core. Idle time while a task waits does
not count as free: the job's threads have only just left such a core.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from ....cores import usable
from ...messages.predictions import Cores
from . import host_facts
from .reading_cost import OF_THIS_AGENT, ReadingCost

PRESSURE = Path("/proc/pressure/cpu")
WINDOW_S, LEAST_S = 5.0, 0.2
"""The seconds over which idle time is averaged, and the fewest seconds that give an average."""


@dataclass(frozen=True)
class _Look:
    at: float  # monotonic seconds
    idle: float  # seconds, of all cores together
    waited: float  # seconds in which some task waited for a core


class IdleCores:
    """Reads the counters at each heartbeat of the agent and on request; any thread may call it."""

    def __init__(self, cost: ReadingCost = OF_THIS_AGENT) -> None:
        self._lock = threading.Lock()
        self._cost = cost
        self._looks = [_look()]

    def heartbeat(self) -> None:
        """Read the counters, and forget readings that are too old."""
        with self._lock:
            self._add()

    def cores(self) -> Cores:
        """The mean over the last seconds; waits for :data:`LEAST_S` after the first reading."""
        with self._lock:
            now = self._add()
            then = self._looks[0]
            if now.at - then.at < LEAST_S:
                time.sleep(LEAST_S)
                now = self._add()
        seconds = now.at - then.at
        idle = (now.idle - then.idle) / seconds * max(0.0, 1 - (now.waited - then.waited) / seconds)
        able = min(usable(), max(0.0, idle))
        return Cores(usable(), able, self._cost.per_byte, host_facts.boot())

    def _add(self) -> _Look:
        now = _look()
        self._looks = [*self._looks, now]
        while len(self._looks) > 2 and self._looks[1].at <= now.at - WINDOW_S:
            del self._looks[0]
        return now


def _look() -> _Look:
    return _Look(time.monotonic(), psutil.cpu_times().idle, _waited())


def _waited() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel without PSI
        line = PRESSURE.read_text().split("\n", 1)[0]
        return int(line.rpartition("total=")[2]) / 1e6
    return 0.0
