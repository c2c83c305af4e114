# SPDX-License-Identifier: Apache-2.0
"""The processes whose threads this helper holds, for agents that may come and go.

A hold belongs to the helper and not to the agent that asked for it. If an agent dies in the middle
of a move, the process must not run without its device memory; the restarted agent goes on with the
move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ...errors import StepFailed
from ..hold import ThreadHold, spared_threads
from .operations import Operations


class HeldProcesses:
    """All holds, by process. Any thread may use it."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._holds: dict[int, ThreadHold] = {}
        self._mutex = threading.Lock()
        self._turns: dict[int, threading.Lock] = {}
        """A process that is about to be held has its lock taken: others wait for the outcome."""

    def why_stay(self) -> str:
        """Why the helper must not end, in words: it holds threads that would run on. "" if none."""
        with self._mutex:
            alive = [pid for pid in self._holds if Path(f"/proc/{pid}").exists()]
        return f"it still holds the threads of process {alive[0]}" if alive else ""

    def hold(
        self,
        pid: int,
        kill_on_exit: bool,
        timeout_s: float,
        outside_s: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hold a process; does nothing if it is held already. Raises StepFailed.

        With ``outside_s``, wait at most so many seconds until each thread is outside of the CUDA
        driver's calls. ``gone`` tells whether the client has ended. If it has, this releases the
        process and raises StepFailed, because no other client knows of the hold."""
        with self._turn(pid):
            if self._of(pid) is None:
                hold = self._begun(pid, kill_on_exit, timeout_s, outside_s)
                if gone():
                    hold.end()
                    raise StepFailed("hold", f"process {pid}: its client has gone")
                with self._mutex:
                    self._holds[pid] = hold

    def _begun(
        self, pid: int, kill_on_exit: bool, timeout_s: float, outside_s: float
    ) -> ThreadHold:
        self._forget_ended()
        restore_thread = self._operations.restore_thread(pid)
        hold = ThreadHold(
            pid, lambda pid: spared_threads(pid, restore_thread), kill_on_exit=kill_on_exit
        )
        if outside_s:
            hold.begin_outside(timeout_s, outside_s)
        else:
            hold.begin(timeout_s)
        return hold

    def holds(self, pid: int) -> bool:
        """Whether the process is held. If it is just about to be, wait for the outcome."""
        with self._turn(pid):
            return self._of(pid) is not None

    def spare_from_exit(self, pid: int) -> None:
        """Do not kill a held process any more if this process ends. Raises StepFailed."""
        hold = self._of(pid)
        if hold is None:
            raise StepFailed("hold", f"process {pid} is not held: it was killed meanwhile")
        hold.spare_from_exit()

    def release(self, pid: int) -> None:
        """Let the threads go on, if they are held."""
        with self._turn(pid):
            with self._mutex:
                hold = self._holds.pop(pid, None)
            if hold is not None:
                hold.end()

    def _turn(self, pid: int) -> threading.Lock:
        with self._mutex:
            return self._turns.setdefault(pid, threading.Lock())

    def _of(self, pid: int) -> ThreadHold | None:
        """The hold of a process; None also if the held process has ended, since another process may
        have its pid by now."""
        with self._mutex:
            hold = self._holds.get(pid)
        return hold if hold is not None and hold.held else None

    def _forget_ended(self) -> None:
        """Forget held processes that have ended; other processes may have their pids by now."""
        with self._mutex:
            gone = {pid: hold for pid, hold in self._holds.items() if not hold.held}
            for pid in gone:
                del self._holds[pid]
                self._turns.pop(pid, None)
        for hold in gone.values():
            hold.end()
