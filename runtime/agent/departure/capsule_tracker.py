# SPDX-License-Identifier: Apache-2.0
"""The tracker of a capsule, for one migration or for one snapshot after the other.

A migration makes a tracker of its own and closes it. Snapshots of a capsule share one: it lives on
while the job trains, so each snapshot sends only what was written since the one before. That is
right only for a holder whose store has exactly what the tracker has sent. So CapsuleTracker notes
which holder that is, and at which generation its store stands. For any other the tracker forgets
what it has sent, and all memory goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .... import proc_text
from ....criu_glue.capsule.tree import tasks
from ....criu_glue.memory.source.tracker import MemoryTracker
from ....criu_glue.survey import gpu_tasks
from ....errors import Refused, StepFailed
from ..host.running_capsule import RunningCapsule
from .paused_silence import PausedSilence

RETURN_S = 30.0
"""A snapshot that was given up returns the tracker within this many seconds."""


def follow(resident: RunningCapsule) -> MemoryTracker:
    """Return a tracker of all processes of the capsule. The caller closes it."""
    return MemoryTracker(lambda: [task.pid for task in tasks(resident.sandbox)], untrusted)


def untrusted(pid: int) -> bool:
    """Whether a process's memory may change without a trace in the kernel's page tables: a device
    that has pinned the pages writes to them directly."""
    try:
        if gpu_tasks.look(pid, pid, "") is not None:
            return True
        return "VmPin:\t       0 kB" not in proc_text.read(f"/proc/{pid}/status")
    except (FileNotFoundError, ProcessLookupError):
        return False


class CapsuleTracker:
    """The tracker of one capsule's snapshots. Any thread may call its methods."""

    def __init__(
        self, resident: RunningCapsule, make: Callable[[RunningCapsule], MemoryTracker] = follow
    ) -> None:
        """``make`` makes the tracker when it is first needed."""
        self._resident = resident
        self._make = make
        self._tracker: MemoryTracker | None = None
        self._stands = ("", 0)  # the holder and generation that have exactly what was sent
        self.sends_all = True
        """Whether the snapshot that has the tracker sends all memory, also what its holder has."""
        self.silence = PausedSilence()
        self._borrower = ""  # the holder of the snapshot that has the tracker now
        self._changed = threading.Condition()

    def lend(self, holder: str, generation: int, least: int = 1) -> MemoryTracker:
        """Return the tracker for a snapshot that goes to ``holder``, until :meth:`returned`.

        ``generation``: the one at which the holder's store stands: no page has come since, or the
        store was reverted to it; 0: to none. ``least``: the highest incarnation in the store, which
        drops pages that come under lower ones. Raises Refused while another snapshot has the
        tracker.
        """
        with self._changed:
            if self._borrower:
                raise Refused(
                    f"the memory of {self._resident.spec.name} is followed for a snapshot to"
                    f" {self._borrower}, which has not ended yet",
                    hint="one snapshot of a capsule can be taken at a time",
                )
            if self._tracker is None:
                self._tracker = self._make(self._resident)
            self.sends_all = self._stands != (holder, generation)
            if self.sends_all:
                self._tracker.forget_sent(least)
            self._stands, self._borrower = ("", 0), holder
            return self._tracker

    def returned(self, generation: int = 0) -> None:
        """Take the tracker back: the snapshot has ended and does not use it any more.

        ``generation``: the one under which the holder has the whole image; it has acknowledged all
        pages, named ones included. 0: that is not certain. A second call does nothing.
        """
        with self._changed:
            holder, tracker = self._borrower, self._tracker
            if not holder or tracker is None:
                return
            try:
                tracker.stopped = lambda: False  # let go of the snapshot
                tracker.rest()
                if generation:
                    tracker.image_complete()
                    self._stands = (holder, generation)
            finally:
                self._borrower = ""
                self._changed.notify_all()

    def close(self, patience_s: float = RETURN_S) -> None:
        """End the tracking, so that a migration or a forecast can follow the capsule. The next
        :meth:`lend` makes a new tracker. A second call does no harm.

        Waits for a snapshot that has the tracker; the caller gives that snapshot up before. Raises
        StepFailed if it does not return the tracker within ``patience_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._borrower, patience_s):
                name = self._resident.spec.name
                raise StepFailed(
                    "memory",
                    f"the snapshot of {name} to {self._borrower} still follows its memory after"
                    f" {patience_s:g} s",
                    hint="try again once the snapshot has ended",
                )
            self._stands = ("", 0)
            if self._tracker is not None:
                # Not after the lock: a new tracker cannot follow what this one still follows.
                self._tracker.close()
                self._tracker = None
