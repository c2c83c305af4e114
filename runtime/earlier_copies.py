# SPDX-License-Identifier: Apache-2.0
"""Memory of capsules that have left this host, kept should they come back (``precopy.keep``).

A copy is there for nothing but to spare the wire, and so the first to go: when the capsule is back,
when its job has ended, when a capsule that comes needs the memory, when the kernel is short of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from ..criu_glue.memory.earlier_copy import EarlierCopy
from ..criu_glue.tree import tasks
from .messages import Reserve
from .offering import MEMORY_LIMIT
from .resident import Resident

log = logging.getLogger("liveshift.earlier_copies")

SPARE = 2
"""While one is made the memory is there twice."""

TURN_S = 10.0
"""How long a tree that is to be killed waits for the copies of others."""


@dataclass(frozen=True)
class _Kept:
    job: str
    vni: int  # tells a job from a later one of its name
    copy: EarlierCopy


class EarlierCopies:
    """Those of one host, by capsule. For any thread; ``keep``, ``make_room`` and ``drop_job`` block
    for as long as memory takes to be copied, or given back to the kernel."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: bytes, of all of them; None: nothing is kept."""
        self._limit = limit or 0
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    @property
    def bytes(self) -> int:
        """That would be free without them."""
        with self._lock:
            return sum(kept.copy.bytes for kept in self._kept.values() if kept.copy.alive())

    def of(self, ask: Reserve) -> list[int]:
        """The processes that hold some of the job; the capsule's own first."""
        with self._lock:
            found = {
                name: kept.copy.pid
                for name, kept in self._kept.items()
                if (kept.job, kept.vni) == (ask.spec.job, ask.book.vni) and kept.copy.alive()
            }
        return [found[name] for name in sorted(found, key=lambda name: name != ask.spec.name)]

    def keep(self, resident: Resident, wanted: Callable[[], bool] = lambda: True) -> None:
        """Copy what is in the memory of a tree that stands still and is about to be killed: as much
        as an offer can speak of. ``wanted``: whether its job goes on, asked at the end.

        Does nothing where it may not or cannot: that is nobody's loss. Never raises, and gives up
        after some seconds.
        """
        if not self._limit or resident.code is not None or not resident.room.alive():
            return
        if not self._turn.acquire(timeout=TURN_S):
            return
        try:
            self._keep(resident, wanted)
        except Exception as error:
            log.warning("%s leaves nothing behind: %s", resident.spec.name, error)
        finally:
            self._turn.release()

    def _keep(self, resident: Resident, wanted: Callable[[], bool]) -> None:
        name = resident.spec.name
        self._close(self.pop(name))
        available = psutil.virtual_memory().available
        room = min(MEMORY_LIMIT, self._limit - self.bytes, available // SPARE)
        if room <= 0:
            return
        copy = EarlierCopy([task.pid for task in tasks(resident.room)], room)
        with self._lock:
            if copy.bytes and wanted():
                self._kept[name] = _Kept(resident.spec.job, resident.overlay.vni, copy)
                log.info("%s leaves %d MB here, should it come back", name, copy.bytes // 10**6)
                return
        copy.close()

    def make_room(self, ask: Reserve) -> None:
        """For a capsule that comes: other jobs' copies go first, its own last."""
        with self._lock:
            names = sorted(
                self._kept,
                key=lambda name: (name == ask.spec.name, self._kept[name].job == ask.spec.job),
            )
        for name in names:
            if psutil.virtual_memory().available >= ask.limit_bytes:
                return
            self._close(self.pop(name))
            log.info("what %s had left here makes room for %s", name, ask.spec.name)

    def pop(self, name: str) -> EarlierCopy | None:
        """That of a capsule, which is the caller's to close."""
        with self._lock:
            kept = self._kept.pop(name, None)
        return kept.copy if kept is not None else None

    def drop_job(self, job: str) -> None:
        with self._lock:
            names = [name for name, kept in self._kept.items() if kept.job == job]
        for name in names:
            self._close(self.pop(name))

    @staticmethod
    def _close(copy: EarlierCopy | None) -> None:
        if copy is not None:
            copy.close()
