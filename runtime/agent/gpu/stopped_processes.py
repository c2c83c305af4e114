# SPDX-License-Identifier: Apache-2.0
"""The note of a capsule that lists the processes which a move has stopped (SIGSTOP).

While a process's device state is off its GPU, no thread of it may run, and the driver answers no
question about it. Whoever brings the state back has to know which processes the move has stopped,
also after the agent was restarted: those that a user has stopped must stay stopped.

Some parents stop themselves when their child is stopped, such as script(1), su(1) and sudo(8), and
wait for a SIGCONT from whoever stopped it. So the note has the parents, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from ....criu_glue.capsule.sandboxes import Sandbox
from ....criu_glue.capsule.tree import children_first, inner_pid, tasks
from ....cuda_snapshot import threads

NOTE = "gpu-stopped"

WATCH_S, LOOK_S = 2.0, 0.02
"""For WATCH_S seconds parents are continued when they stop themselves: the signal that tells them
that their child has stopped may still be pending when they go on."""


def running_parents(sandbox: Sandbox, pid: int) -> list[int]:
    """The ancestors of a process (the host's pid) in its capsule that are not stopped, its parent
    first; their pids inside."""
    parents = {task.pid: task.ppid() for task in tasks(sandbox)}
    found: list[int] = []
    while (pid := parents.get(pid, 0)) in parents:
        if not threads.stopped(pid):
            found.append(inner_pid(pid))
    return found


def continue_parents(find: Callable[[], list[int]]) -> None:
    """Let processes go on, and again whenever one stops itself in the next seconds. Returns at
    once. ``find`` gives the host's pids of those that live."""

    def watch() -> None:
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            for pid in children_first(find()):
                with suppress(ProcessLookupError):
                    if threads.stopped(pid):
                        os.kill(pid, signal.SIGCONT)
            time.sleep(LOOK_S)

    threading.Thread(target=watch, name="parents", daemon=True).start()


class StoppedProcesses:
    """The note in a capsule's directory. Processes have their pids inside the capsule."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NOTE

    def read(self) -> dict[int, list[int]]:
        """The processes, each with those of its ancestors that ran when it was stopped."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, list[int]])
        except FileNotFoundError:
            return {}

    def add(self, pid: int, parents: Collection[int] = ()) -> None:
        """Note a process before it is stopped."""
        self._write(self.read() | {pid: list(parents)})

    def forget(self, pids: Collection[int] = ()) -> None:
        """Take processes off the note once they go on; all of them without ``pids``."""
        self._write({p: parents for p, parents in self.read().items() if pids and p not in pids})

    def _write(self, pids: dict[int, list[int]]) -> None:
        if not pids:
            self._path.unlink(missing_ok=True)
            return
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(pids))
        part.rename(self._path)
