# SPDX-License-Identifier: Apache-2.0
"""The note of a capsule that lists the processes which a move has stopped (SIGSTOP).

While a process's device state is off its GPU, no thread of it may run, and the driver answers no
question about it. Whoever brings the state back has to know which processes the move has stopped,
also after the agent was restarted: those that a user has stopped must stay stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

NOTE = "gpu-stopped"


class StoppedProcesses:
    """The note in a capsule's directory. Processes have their pids inside the capsule."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NOTE

    def read(self) -> set[int]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=set[int])
        except FileNotFoundError:
            return set()

    def add(self, pid: int) -> None:
        """Note a process before it is stopped."""
        self._write(self.read() | {pid})

    def forget(self, pids: Collection[int] = ()) -> None:
        """Take processes off the note once they go on; all of them without ``pids``."""
        self._write(self.read() - set(pids) if pids else set())

    def _write(self, pids: set[int]) -> None:
        if not pids:
            self._path.unlink(missing_ok=True)
            return
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(sorted(pids)))
        part.rename(self._path)
