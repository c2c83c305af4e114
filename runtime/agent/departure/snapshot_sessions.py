# SPDX-License-Identifier: Apache-2.0
"""The sessions of this host as a source of snapshots: what it keeps of each capsule between them.

A session belongs to one copy of a capsule. It has the tracker of the copy's memory, which lives on
from snapshot to snapshot, and the newest snapshot. Whatever else needs the capsule ends the session
first: a migration and a forecast follow its memory themselves, and a rewind removes the copy.
Two trackers at once would hide writes from each other: each protects again what it has seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ....errors import Refused
from ...messages import Book
from ..host.running_capsule import RunningCapsule
from .capsule_tracker import CapsuleTracker
from .outgoing_phase import SnapshotPhase
from .outgoing_snapshot import OutgoingSnapshot

log = logging.getLogger("liveshift.snapshot")


@dataclass
class Session:
    """The tracker of one copy of a capsule, and its newest snapshot."""

    resident: RunningCapsule
    tracker: CapsuleTracker
    snapshot: OutgoingSnapshot | None = None

    @property
    def open(self) -> bool:
        """Whether the snapshot is under way, or has left something here."""
        return self.snapshot is not None and not self.snapshot.closed

    def abandon(self) -> None:
        if self.snapshot is not None and self.open:
            self.snapshot.abandon()

    def close(self) -> None:
        """Close the snapshot, then the tracker. Blocks. Raises StepFailed if the capsule does not
        go on, or if the tracker does not come back."""
        if self.snapshot is not None:
            self.snapshot.close()
        self.tracker.close()


class SnapshotSessions:
    """The sessions by the names of their capsules. Use it in the event loop only."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._forecasts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way, or has left something here."""
        return any(session.open for session in self._sessions.values())

    def off_gpus(self, capsule: str) -> bool:
        """Whether a snapshot has the capsule's device state off its GPUs."""
        session = self._sessions.get(capsule)
        return session is not None and session.snapshot is not None and session.snapshot.off_gpus

    def dumps(self, capsule: str) -> bool:
        """Whether a snapshot of the capsule has CRIU at work on it, or will at any moment."""
        session = self._sessions.get(capsule)
        snapshot = session.snapshot if session is not None else None
        return snapshot is not None and snapshot.phase in (
            SnapshotPhase.LOCKED,
            SnapshotPhase.DUMPED,
        )

    def gpus_left(self) -> dict[str, str]:
        """GPUs that capsules leave for the time of a snapshot: uuid → the reason, in words."""
        left: dict[str, str] = {}
        for name, session in self._sessions.items():
            if session.snapshot is not None and session.open:
                words = f"is kept for {name}, of which {session.snapshot.snapshot} is taken"
                left |= dict.fromkeys(session.snapshot.gpus, words)
        return left

    @asynccontextmanager
    async def forecast(self, capsule: str) -> AsyncIterator[None]:
        """End the session of the capsule, and let none begin while the caller looks at its memory.
        Raises StepFailed as :meth:`end`."""
        async with self._forecasts[capsule]:
            await self.end(capsule)
            yield

    async def make_way(self, resident: RunningCapsule) -> None:
        """Wait for the end of a forecast. End an earlier snapshot of the capsule, but not its
        tracker; end all of an earlier copy. Raises StepFailed if that fails."""
        async with self._forecasts[resident.spec.name]:
            pass
        session = self._sessions.get(resident.spec.name)
        if session is None:
            return
        if session.resident is not resident:
            await self._end(session)
        elif session.snapshot is not None and session.open:
            session.abandon()
            await asyncio.to_thread(session.snapshot.close)

    def begin(
        self, resident: RunningCapsule, make: Callable[[CapsuleTracker], OutgoingSnapshot]
    ) -> OutgoingSnapshot:
        """Begin the snapshot that ``make`` returns. Raises Refused if an earlier one, or one of
        another copy, has not ended, or if a forecast has begun: :meth:`make_way` ends these."""
        name = resident.spec.name
        if self._forecasts[name].locked():
            raise Refused(
                f"a forecast looks at the memory of {name}",
                hint="a snapshot can begin when it is over, in a few seconds",
            )
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(resident, CapsuleTracker(resident))
        elif session.open or session.resident is not resident:
            raise Refused(
                f"an earlier snapshot of {name} has not ended yet",
                hint="one snapshot of a capsule can be taken at a time",
            )
        session.snapshot = made = make(session.tracker)
        return made

    def find(self, image: str, capsule: str) -> OutgoingSnapshot | None:
        """The capsule's newest snapshot, also after its end; None if it has another name."""
        session = self._sessions.get(capsule)
        snapshot = session.snapshot if session is not None else None
        return snapshot if snapshot is not None and snapshot.snapshot == image else None

    def abandon(self, capsule: str) -> None:
        """Interrupt what is under way for a snapshot of the capsule. A thread thaws it."""
        if (session := self._sessions.get(capsule)) is not None:
            session.abandon()

    def abandon_all(self) -> None:
        for session in self._sessions.values():
            session.abandon()

    async def end(self, capsule: str) -> None:
        """Give up a snapshot that is under way, and close the tracker: after this the capsule runs,
        and anything else may follow its memory. Raises StepFailed if that fails."""
        if (session := self._sessions.get(capsule)) is not None:
            await self._end(session)

    async def end_gone(self, capsules: Mapping[str, RunningCapsule]) -> None:
        """End the sessions of copies that have ended, or are not among ``capsules`` any more."""
        gone = [
            session
            for name, session in self._sessions.items()
            if capsules.get(name) is not session.resident or session.resident.code is not None
        ]
        outcomes = await asyncio.gather(*map(self._end, gone), return_exceptions=True)
        for session, outcome in zip(gone, outcomes, strict=True):
            if isinstance(outcome, Exception):
                name = session.resident.spec.name
                log.error("a snapshot of %s, which is gone: %s", name, outcome)
            elif outcome is not None:
                raise outcome

    async def drop_earlier(self, book: Book, limit_s: float) -> None:
        """End the sessions of the job's copies from before the rewind that the book is of. Their
        tasks have ended. Raises Refused if one does not end within ``limit_s`` seconds."""
        for session in list(self._sessions.values()):
            resident = session.resident
            if resident.spec.job != book.job or resident.overlay.rewinds >= book.rewinds:
                continue
            try:
                async with asyncio.timeout(limit_s):
                    await self._end(session)
            except TimeoutError:
                name = resident.spec.name
                raise Refused(
                    f"a snapshot still works on {name}, {limit_s:g} s after {name} was ended"
                ) from None

    async def _end(self, session: Session) -> None:
        session.abandon()
        await asyncio.to_thread(session.close)
        name = session.resident.spec.name
        # A snapshot may have begun meanwhile, with the same tracker.
        if self._sessions.get(name) is session and not session.open:
            del self._sessions[name]
