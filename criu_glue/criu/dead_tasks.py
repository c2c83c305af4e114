# SPDX-License-Identifier: Apache-2.0
"""Notices that CRIU waits for a process that was killed while CRIU had it stopped: it does so for
ever.

CRIU waits for the first thread of a process by its id (wait4(2)). Once a process has ended, the
kernel reports its first thread only after the tracer has asked for all others, which CRIU does not
do. Of 120 kills at random moments of a dump of a process with 13 threads, one led to this (CRIU
4.2).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ... import proc_text

DEAD_S = 1.0
"""CRIU usually fails within 10 ms after a process was killed under it."""


class DeadTasks:
    """The processes of a tree that CRIU works on. ``pids``: as the host sees them."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = tuple(pids)
        self._since: float | None = None

    def waited_for(self) -> bool:
        """Whether one has been dead for DEAD_S seconds, and a tracer has not let go of it. To be
        asked again and again while CRIU works."""
        now = time.monotonic()
        if not any(map(_dead_and_traced, self._pids)):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= DEAD_S


def _dead_and_traced(pid: int) -> bool:
    try:
        lines = proc_text.lines(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return fields["State"].split()[0] == "Z" and int(fields["TracerPid"]) != 0
