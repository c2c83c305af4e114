# SPDX-License-Identifier: Apache-2.0
"""How much of the time in which a tree wants to compute it can compute. For a job without
collectives this shows whether a pre-copy holds it up.

A thread that does not sleep computes, waits for a busy core, or is in the kernel. A pre-copy sends
it into the kernel at each first write to a page that was read. The kernel counts all three
(schedstats, and proc_pid_stat(5)). It cannot count that memory is slower while others read it too.
Of threads that wait for each other, only the held-up ones count, not those that spin meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .... import proc_text

LOOK_S = 0.4
"""A look every LOOK_S seconds reads two files of /proc for each thread."""

LIST_S = 2.0
"""The tree's processes are listed every LIST_S seconds. Each list goes through all processes of the
host."""


class _Thread(NamedTuple):
    """Counts since a thread began: ns on a core, ns of waiting for one; user and kernel ticks."""

    ran: int
    waited: int
    user: int
    kernel: int


class RunTime:
    """The progress of the processes that ``pids`` lists; any thread may call it."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pids, self._clock = pids, clock
        self._lock = threading.Lock()
        self._listed: list[int] = []
        self._listed_at = self._looked = float("-inf")
        self._threads: dict[tuple[int, str], _Thread] = {}
        self._progress = 0.0

    def progress(self, *, at_once: bool = False) -> int:
        """Milliseconds since the first call, less those in which the tree was held up; 0 until
        that is known. ``at_once``: count up to now, not only up to the last look."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= (0.0 if at_once else LOOK_S):
                self._read_tasks(now)
            return int(1000 * self._progress)

    def _read_tasks(self, now: float) -> None:
        if now - self._listed_at >= LIST_S:
            self._listed, self._listed_at = list(self._pids()), now
        threads = {key: each for pid in self._listed for key, each in _threads(pid)}
        wanted = held_up = 0.0
        for key in threads.keys() & self._threads.keys():
            ran, waited, user, kernel = (
                after - before
                for after, before in zip(threads[key], self._threads[key], strict=True)
            )
            in_kernel = ran * kernel / (user + kernel) if user + kernel else 0.0
            wanted += (ran + waited) / 1e9
            held_up += (waited + in_kernel) / 1e9
        seconds = now - self._looked
        if threads and self._threads:
            share = held_up / max(seconds, wanted)
            self._progress += seconds * min(1.0, max(0.0, 1 - share))  # a pid may be used again
        self._threads, self._looked = threads, now


def ran_s(pids: Iterable[int]) -> float:
    """Seconds that all threads of these processes have spent on a core since they began."""
    return sum(thread.ran for pid in pids for _, thread in _threads(pid)) / 1e9


def _threads(pid: int) -> Iterable[tuple[tuple[int, str], _Thread]]:
    """The threads of a process; none if it has ended or if the kernel does not count for it."""
    top = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(top):
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                ran, waited, _ = _words(f"{top}/{thread}/schedstat")
                # Fields 3 and up. They follow the name, which may contain spaces and brackets.
                fields = _words(f"{top}/{thread}/stat", after=")")
                yield (pid, thread), _Thread(*map(int, (ran, waited, fields[11], fields[12])))


def _words(path: str, after: str = "") -> list[str]:
    text = proc_text.read(path)
    return (text.rpartition(after)[2] if after else text).split()
