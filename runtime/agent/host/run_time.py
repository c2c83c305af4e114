# SPDX-License-Identifier: Apache-2.0
"""How much of the time in which a tree wants to compute it does: what tells of a job without
collectives whether it is held up.

A thread that does not sleep computes, waits for a core that another has, or is in the kernel, where
a pre-copy puts it with every first write to a page that was read. The kernel counts all three
(schedstats, and proc_pid_stat(5)). What it cannot tell is how much slower memory is that others
read, too; and of threads that wait for each other only those that were held up count, not those
that spin meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

LOOK_S = 0.4
"""Between two looks: of each thread two files of /proc are read."""

LIST_S = 2.0
"""Between two lists of the tree's processes, for which all of the host's are gone through."""


class _Thread(NamedTuple):
    """Since it began: nanoseconds on a core and waiting for one; ticks of user and kernel mode."""

    ran: int
    waited: int
    user: int
    kernel: int


class RunTime:
    """Of the processes that ``pids`` lists; from any thread."""

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
        """Milliseconds since the first call, less those that the tree was held up; 0 as long as
        that is not known. ``at_once``: until now, and not until the last look."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= (0.0 if at_once else LOOK_S):
                self._look(now)
            return int(1000 * self._progress)

    def _look(self, now: float) -> None:
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
    """Those of a process; none once it has ended, or where the kernel counts none of it."""
    top = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(top):
            with contextlib.suppress(OSError):  # ended meanwhile
                ran, waited, _ = _words(f"{top}/{thread}/schedstat")
                # After the name, which may have spaces and brackets in it: field 3 and so on.
                fields = _words(f"{top}/{thread}/stat", after=")")
                yield (pid, thread), _Thread(*map(int, (ran, waited, fields[11], fields[12])))


def _words(path: str, after: str = "") -> list[str]:
    with open(path) as file:
        text = file.read()
    return (text.rpartition(after)[2] if after else text).split()
