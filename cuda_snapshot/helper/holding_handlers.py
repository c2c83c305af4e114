# SPDX-License-Identifier: Apache-2.0
"""The processes whose threads this helper holds, for agents that may come and go.

A hold belongs to the helper and not to the agent that asked for it. If an agent dies in the middle
of a move, the process must not run without its device memory; the restarted agent goes on with the
move.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from ...errors import StepFailed
from ..hold import ThreadHold, spared_threads
from .calls import HelperRequest, Holds, HoldThreads, Release, SpareFromExit
from .operations import Operations
from .server import Caller, Handler


class HoldingHandlers:
    """The handlers of requests about holds."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._holds: dict[int, ThreadHold] = {}
        self._mutex = threading.Lock()

    def handlers(self) -> Mapping[type[HelperRequest], Handler]:
        return {
            HoldThreads: self._hold,
            SpareFromExit: self._spare_from_exit,
            Release: self._release,
            Holds: lambda _, request: self._of(request.pid) is not None,
        }

    def why_stay(self) -> str:
        """Why the helper must not end, in words: it holds threads that would run on. "" if none."""
        with self._mutex:
            alive = [pid for pid in self._holds if Path(f"/proc/{pid}").exists()]
        return f"it still holds the threads of process {alive[0]}" if alive else ""

    def _hold(self, caller: Caller, request: HoldThreads) -> None:
        """Hold a process; does nothing if it is held already."""
        self._forget_ended()
        if self._of(request.pid) is not None:
            return
        restore_thread = self._operations.restore_thread(request.pid)
        hold = ThreadHold(
            [request.pid],
            lambda pid: spared_threads(pid, restore_thread),
            kill_on_exit=request.kill_on_exit,
        )
        hold.begin(request.timeout_s)
        with self._mutex:
            self._holds[request.pid] = hold

    def _spare_from_exit(self, caller: Caller, request: SpareFromExit) -> None:
        hold = self._of(request.pid)
        if hold is None:
            raise StepFailed("hold", f"process {request.pid} is not held: it was killed meanwhile")
        hold.spare_from_exit()

    def _release(self, caller: Caller, request: Release) -> None:
        with self._mutex:
            hold = self._holds.pop(request.pid, None)
        if hold is not None:
            hold.end()

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
        for hold in gone.values():
            hold.end()
