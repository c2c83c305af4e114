# SPDX-License-Identifier: Apache-2.0
"""Memory of capsules that have left this host, kept should they come back (``precopy.keep``).

A copy is there for nothing but to spare the wire, and so the first to go: when the capsule is back,
when its job has ended, when a capsule that comes needs the memory, when the kernel is short of it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import psutil

from ..criu_glue.memory.earlier_copy import EarlierCopy
from ..criu_glue.survey import tasks
from ..errors import StepFailed
from .messages import Reserve
from .resident import Resident

log = logging.getLogger("liveshift.earlier_copies")

SPARE = 2
"""While one is made the memory is there twice."""


@dataclass(frozen=True)
class _Kept:
    job: str
    vni: int  # tells a job from a later one of its name
    copy: EarlierCopy


class EarlierCopies:
    """Those of one host, by capsule. For any thread; all but ``bytes`` and ``of`` block for as long
    as memory takes to be copied, or given back to the kernel."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: bytes, of all of them; None: nothing is kept."""
        self._limit = limit or 0
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    @property
    def bytes(self) -> int:
        """That would be free without them."""
        with self._lock:
            return sum(kept.copy.bytes for kept in self._kept.values() if kept.copy.alive())

    def of(self, ask: Reserve) -> list[int]:
        """The processes that hold some of the job."""
        with self._lock:
            return [
                kept.copy.pid
                for kept in self._kept.values()
                if (kept.job, kept.vni) == (ask.spec.job, ask.book.vni) and kept.copy.alive()
            ]

    def keep(self, resident: Resident) -> None:
        """Copy what is in the memory of a tree that stands still and is about to be killed.

        Does nothing where it may not or cannot: that is nobody's loss.
        """
        name = resident.spec.name
        with self._one_at_a_time:
            self.drop(name)
            room = min(self._limit - self.bytes, psutil.virtual_memory().available // SPARE)
            if room <= 0 or not self._limit:
                return
            try:
                copy = EarlierCopy([task.pid for task in tasks(resident.room)], room)
            except (StepFailed, OSError) as error:
                log.warning("%s leaves nothing behind: %s", name, error)
                return
            with self._lock:
                self._kept[name] = _Kept(resident.spec.job, resident.overlay.vni, copy)
        log.info("%s leaves %d MB here, should it come back", name, copy.bytes // 10**6)

    def make_room(self, ask: Reserve) -> None:
        """For a capsule that comes: other jobs' first, its own job's where that does not do."""
        with self._lock:
            order = sorted(self._kept, key=lambda name: self._kept[name].job == ask.spec.job)
        for name in order:
            if psutil.virtual_memory().available >= ask.limit_bytes:
                return
            self.drop(name)
            log.info("what %s had left here makes room for %s", name, ask.spec.name)

    def drop(self, name: str) -> None:
        """That of a capsule, if there is one."""
        with self._lock:
            kept = self._kept.pop(name, None)
        if kept is not None:
            kept.copy.close()

    def drop_job(self, job: str) -> None:
        with self._lock:
            names = [name for name, kept in self._kept.items() if kept.job == job]
        for name in names:
            self.drop(name)

    def close(self) -> None:
        """Let go of all of them."""
        for name in list(self._kept):
            self.drop(name)
