# SPDX-License-Identifier: Apache-2.0
"""This module lowers the weight of this process while it copies memory on idle cores.

While memory is copied beside a running job, the job must not wait for a core. A limit on the rate
does not see to that: the copy has more threads than the job, they run in bursts, and the kernel
divides the cores among all of them. So this process lowers its own weight while it copies on idle
cores, and raises it again as soon as a capsule is frozen: then the job waits for the copy.

The kernel has two weights, so both are changed:

- With autogroup each session has a weight of its own, and the nice value of a thread only divides
  the session's share (sched(7)). /proc/PID/autogroup changes that of the session. It is changed
  only if this process leads its session. Processes that it starts meanwhile are in the session
  until they begin one of their own, as the first process of each capsule does.
- Without autogroup the nice value of the thread counts (setpriority(2); Linux has one per thread).
  A child process inherits it and a job must not. So only threads that start no process take it
  (:meth:`Background.adopt`).

Neither helps where this process and the job are in different cgroups that divide the CPU time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from functools import cache
from pathlib import Path

log = logging.getLogger("liveshift.background")

NICE = 10
"""The weight of nice 10 is a tenth of that of nice 0 (kernel/sched/core.c, sched_prio_to_weight).
A lower one would let a copy starve if the job takes all cores after all."""

AUTOGROUP = Path("/proc/self/autogroup")
AGAIN_S = 0.1
"""Without CAP_SYS_ADMIN the kernel takes ten changes of all autogroups per second, and answers
EAGAIN to the next (kernel/sched/autogroup.c)."""


class Background:
    """The weight of this process, for all its migrations; any thread may call everything.

    The weight is lowered while at least one migration copies in the background and no migration
    has a frozen capsule.
    """

    def __init__(self, autogroup: Path = AUTOGROUP) -> None:
        self._autogroup = autogroup
        self._lock = threading.Lock()
        # For each migration: whether it copies in the background. If not, a job waits for it.
        self._background: dict[str, bool] = {}
        self._nice = 0  # the present nice value of the copies
        self._usual = 0  # the session's nice value before it was lowered
        self._own = threading.local()

    def begin(self, migration: str) -> None:
        """The migration begins to copy on idle cores, beside its running job."""
        self._set(migration, background=True)

    def leave(self, migration: str) -> None:
        """A job or an operator waits for the migration now: its capsule is frozen, or its deadline
        is near."""
        self._set(migration, background=False)

    def end(self, migration: str) -> None:
        """The migration is over. A second call does no harm."""
        with self._lock:
            if self._background.pop(migration, None) is not None:
                self._apply()

    def adopt(self) -> None:
        """Give the calling thread the present nice value. The thread must start no process."""
        low = self._nice > 0
        if getattr(self._own, "low", False) == low or not _may_raise_priority():
            return
        thread = threading.get_native_id()
        if low:
            self._own.usual = os.getpriority(os.PRIO_PROCESS, thread)
        nice = max(self._own.usual, NICE) if low else self._own.usual
        os.setpriority(os.PRIO_PROCESS, thread, nice)
        self._own.low = low

    def _set(self, migration: str, *, background: bool) -> None:
        with self._lock:
            if self._background.get(migration) is not background:
                self._background[migration] = background
                self._apply()

    def _apply(self) -> None:
        states = self._background.values()
        nice = NICE if states and all(states) else 0
        if nice != self._nice:
            self._nice = nice
            if os.getsid(0) == os.getpid():
                if nice:
                    self._usual = _read(self._autogroup)
                _write(self._autogroup, max(self._usual, nice) if nice else self._usual)


def _read(autogroup: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel without autogroup
        return int(autogroup.read_text().split()[-1])
    return 0


def _write(autogroup: Path, nice: int) -> None:
    for last in (False, True):
        try:
            autogroup.write_text(str(nice))
        except BlockingIOError:
            if not last:
                time.sleep(AGAIN_S)
        except OSError as error:  # a kernel without autogroup has no such file
            log.debug("the weight of the session stays: %s", error)
        else:
            return


@cache
def _may_raise_priority() -> bool:
    """Whether a thread of this process may lower its priority and raise it again: without
    CAP_SYS_NICE it could not go back (setpriority(2))."""
    allowed = []

    def try_it() -> None:
        with contextlib.suppress(OSError):
            usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            for nice in (min(usual + 1, 19), usual):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            allowed.append(True)

    trying = threading.Thread(target=try_it)
    trying.start()
    trying.join()
    return bool(allowed)


_OF_THIS_PROCESS = Background()
begin, leave, end, adopt = (
    _OF_THIS_PROCESS.begin,
    _OF_THIS_PROCESS.leave,
    _OF_THIS_PROCESS.end,
    _OF_THIS_PROCESS.adopt,
)
