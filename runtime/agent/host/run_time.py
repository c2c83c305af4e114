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
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .... import proc_text

LOOK_S = 0.4
"""A look every LOOK_S seconds reads two files of /proc for each thread, and a third one for those
that do not sleep."""

LIST_S = 2.0
"""The tree's processes are listed every LIST_S seconds. Each list goes through all processes of the
host."""

REMEMBERED = 6
"""So many stretches between two looks may still turn out to have been waits."""

_Key = tuple[int, str]
"""A process and its thread."""


class _Thread(NamedTuple):
    """Counts since a thread began: ns on a core, ns of waiting for one; user and kernel ticks.
    ``slept``: how often it has gone to sleep; None if it sleeps now."""

    ran: int
    waited: int
    user: int
    kernel: int
    slept: int | None


class _Used(NamedTuple):
    """How a thread has spent a stretch, in seconds; for the rest of it the thread has slept.
    ``in_kernel`` is a part of ``ran``."""

    ran: float
    waited: float
    in_kernel: float


@dataclass
class _Stretch:
    """The time between two looks, and what became of the threads that were there at both."""

    seconds: float
    threads: dict[_Key, _Used] = field(default_factory=dict)

    def add_wait(self, key: _Key, waited: float) -> float:
        """Let a thread have waited where it seems to have slept. Return the seconds for which it
        has not."""
        if (used := self.threads.get(key)) is None:
            return waited
        here = min(waited, max(0.0, self.seconds - used.ran - used.waited))
        self.threads[key] = used._replace(waited=used.waited + here)
        return waited - here

    def progress(self) -> float:
        """The seconds of the stretch, less those in which the tree was held up."""
        wanted = sum(used.ran + used.waited for used in self.threads.values())
        held_up = sum(used.waited + used.in_kernel for used in self.threads.values())
        if not held_up:
            return self.seconds
        return self.seconds * max(0.0, 1 - held_up / max(self.seconds, wanted))


class RunTime:
    """The progress of the processes that ``pids`` lists; any thread may call it."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pids, self._clock = pids, clock
        self._lock = threading.Lock()
        self._listed: list[int] = []
        self._listed_at = self._looked = float("-inf")
        self._threads: dict[_Key, _Thread] = {}
        self._stretches: deque[_Stretch] = deque()
        self._before = 0.0  # the progress before these
        self._progress = 0.0

    def progress(self, *, at_once: bool = False) -> int:
        """Milliseconds since the first call, less those in which the tree was held up; 0 until
        that is known. ``at_once``: count up to now, not only up to the last look. It never goes
        back: where a wait is seen late, it stays until it was right."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= (0.0 if at_once else LOOK_S):
                self._read_tasks(now)
            return int(1000 * self._progress)

    def _read_tasks(self, now: float) -> None:
        if now - self._listed_at >= LIST_S:
            self._listed, self._listed_at = list(self._pids()), now
        threads = {key: each for pid in self._listed for key, each in _threads(pid)}
        now = self._clock()  # a list takes time, and this thread may have had to wait for a core
        if threads and self._threads:
            self._add(_Stretch(now - self._looked), threads)
        self._threads, self._looked = threads, now

    def _add(self, stretch: _Stretch, threads: dict[_Key, _Thread]) -> None:
        self._stretches.append(stretch)
        for key in threads.keys() & self._threads.keys():
            before, after = self._threads[key], threads[key]
            if (used := _used(before, after)) is None:
                continue
            stretch.threads[key] = used._replace(waited=0.0)
            # The kernel adds a wait once it is over (schedstat). A thread that a look has found
            # waiting seems to have slept until then, and to have waited too long at the next look.
            # In which of these stretches a wait counts makes no difference to their sum.
            waited = used.waited
            for each in self._stretches:
                waited = each.add_wait(key, waited)
            if before.slept == after.slept is not None:  # it waits now, perhaps
                stretch.add_wait(key, stretch.seconds)
        if len(self._stretches) > REMEMBERED:
            self._before += self._stretches.popleft().progress()
        so_far = self._before + sum(each.progress() for each in self._stretches)
        self._progress = max(self._progress, so_far)


def _used(before: _Thread, after: _Thread) -> _Used | None:
    """What a thread has used between two looks; None if another one has its number now."""
    ran, waited, user, kernel = (b - a for a, b in zip(before[:4], after[:4], strict=True))
    if min(ran, waited, user, kernel) < 0:
        return None
    in_kernel = ran * kernel / (user + kernel) if user + kernel else 0.0
    return _Used(ran / 1e9, waited / 1e9, in_kernel / 1e9)


def ran_s(pids: Iterable[int]) -> float:
    """Seconds that all threads of these processes have spent on a core since they began."""
    return sum(thread.ran for pid in pids for _, thread in _threads(pid)) / 1e9


def _threads(pid: int) -> Iterable[tuple[_Key, _Thread]]:
    """The threads of a process; none if it has ended or if the kernel does not count for it."""
    top = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(top):
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                ran, waited, _ = _words(f"{top}/{thread}/schedstat")
                # Fields 3 and up. They follow the name, which may contain spaces and brackets.
                fields = _words(f"{top}/{thread}/stat", after=")")
                slept = _slept(f"{top}/{thread}/status") if fields[0] == "R" else None
                counts = int(ran), int(waited), int(fields[11]), int(fields[12])
                yield (pid, thread), _Thread(*counts, slept)


def _slept(path: str) -> int:
    """Only a thread that goes to sleep leaves its core of its own accord (proc_pid_status(5))."""
    return int(_words(path, after="\nvoluntary_ctxt_switches:")[0])


def _words(path: str, after: str = "") -> list[str]:
    text = proc_text.read(path)
    return (text.rpartition(after)[2] if after else text).split()
