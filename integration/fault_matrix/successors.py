# SPDX-License-Identifier: Apache-2.0
"""Which copies of a capsule run where while its job is snapshotted, rewound or suspended.

A rewind makes a successor of each copy. What ARCHITECTURE promises of the earlier copy is asserted:

- Only on a host that is cut off may it run beside its successor, and no longer than until that host
  is heard again.
- Even there it can end no more than the collective in which it is. Each copy counts in its own page
  of the interposer what it has finished, so a watcher sees from outside which copy makes progress.

Unlike in a move, an earlier copy may be frozen, and go on: a snapshot that is given up, on a host
that is cut off, thaws it. And there may be none at all, since the job's images lie elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whereabouts import GONE

from liveshift.criu_glue.capsule.sandboxes import PAGES
from liveshift.interposer import page
from liveshift.launcher.lab import Lab

from .watcher import RUNNING, Change, Sandbox, Watcher

ENDS_MORE = 1
"""Collectives that a copy may finish beside its successor: the one in which it is."""


@dataclass(eq=False)
class Copy:
    """A copy that has run. ``fenced_at``: the collectives that it had finished when its successor
    was first seen running; None while there is none. ``finished``: as it was seen last."""

    sandbox: Sandbox
    finished: int = 0
    fenced_at: int | None = None
    told: bool = False

    def __str__(self) -> str:
        return f"the copy on {self.sandbox.host} (process 1 is {self.sandbox.init})"


class Successors(Watcher):
    """Watches one capsule for as long as the ``with`` block lasts; ``broken`` says what was wrong.

    :meth:`cut_off` and :meth:`heard_again` say which host may run an earlier copy on.
    """

    period_s = 0.02

    def __init__(
        self,
        find_lab: Callable[[], Lab],
        capsule: str,
        pids: Collection[int],
        longest_gap_s: float,
    ) -> None:
        super().__init__(find_lab, capsule, pids, longest_gap_s)
        self._copies: list[Copy] = []  # in the order in which they ran
        self._cut_off: str | None = None
        self.overlapped = False
        """Whether an earlier copy has been seen running beside its successor."""

    def cut_off(self, host: str) -> None:
        self._cut_off = host
        self.mark(f"{host} is cut off")

    def heard_again(self) -> None:
        """No host is cut off any more, and each is back."""
        self._cut_off = None
        self.mark("all hosts are heard")

    # ---- one sample ----

    def _look(self) -> None:
        running = self._running()
        if len(running) > 1 and self._surplus(running):
            running = self._running()  # a sample is not one instant
        for copy in running:
            copy.finished = self._finished(copy)
        self.overlapped |= len(running) > 1
        for copy in self._surplus(running):
            self._tell(copy, f"TWO RUN: {copy} beside {running[-1]}")
        for copy in [each for each in running if each is not self._copies[-1]]:
            if copy.fenced_at is None:
                copy.fenced_at = copy.finished
            elif copy.finished > copy.fenced_at + ENDS_MORE:
                more = copy.finished - copy.fenced_at
                self._tell(copy, f"A FENCED COPY MAKES PROGRESS: {copy} finished {more} more")
        sight = tuple(
            (copy.sandbox.host, f"{RUNNING} (copy {number})")
            for number, copy in enumerate(self._copies, start=1)
            if copy in running
        )
        if not self.changes or self.changes[-1].sight != sight:
            self.changes.append(Change(time.monotonic() - self._began, sight))
        self.samples += 1

    def _running(self) -> list[Copy]:
        """The copies that run now, the latest one last."""
        self._take_over_hosts()
        self._take_over_tasks()
        found = []
        for sandbox in list(self._sandboxes.values()):
            if sandbox is not None and self._state(sandbox) == RUNNING:
                if not any(copy.sandbox is sandbox for copy in self._copies):
                    self._copies.append(Copy(sandbox))
                found.append(sandbox)
        return [copy for copy in self._copies if any(copy.sandbox is each for each in found)]

    def _surplus(self, running: list[Copy]) -> list[Copy]:
        """The earlier copies that may not run."""
        return [copy for copy in running[:-1] if copy.sandbox.host != self._cut_off]

    def _finished(self, copy: Copy) -> int:
        """How many collectives all processes of a copy have finished; as before if it has just
        ended."""
        count = 0
        with suppress(*GONE, OSError, page.PageError):
            for inner, pid in list(copy.sandbox.tasks.items()):
                count += page.read(Path(f"/proc/{pid}/root{PAGES}/{inner}")).finished
            return count
        return copy.finished

    def _tell(self, copy: Copy, what: str) -> None:
        if not copy.told:
            copy.told = True
            self.broken.append(f"{what} ({time.monotonic() - self._began:.3f} s)")
