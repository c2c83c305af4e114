# SPDX-License-Identifier: Apache-2.0
"""A host as the source of snapshots: it answers the orchestrator's requests from StartSnapshot to
CloseSnapshot, and the one that ends copies from before a rewind.

departure/outgoing_snapshot.py does the work. These requests do not wait for other work on the same
capsule (CapsuleTable.blocking): a thaw must interrupt what is under way, and steps of one snapshot
take turns by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import NotFound, Refused, StepFailed
from .. import messages
from ..daemon.faultpoints import reached
from ..model.snapshots import image_number
from ..wire import Lanes, Sender
from .arrival.inbox import Inbox
from .departure.capsule_tracker import CapsuleTracker
from .departure.outgoing_memory import OutgoingWire
from .departure.outgoing_snapshot import OutgoingSnapshot
from .departure.own_copy import OwnCopy
from .gpu.devices import DeviceTree
from .host.capsule_table import CapsuleTable
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.snapshot")

PLAIN = "snapshots use the driver's checkpoint"
"""Why the GPU helper takes no device memory: it would have to give it back, and send it, too."""


@dataclass(frozen=True)
class Ahead:
    """A StartSnapshot in the words of the source (outgoing_snapshot.SnapshotRequest)."""

    generation: int
    destination: str
    stands: int
    least: int
    own: int | None
    deadline: float


class SnapshotHandlers:
    """Answers StartSnapshot, LockCapsule, DumpCapsule, ThawCapsule, SealSnapshot, CloseSnapshot and
    EndEarlier.

    ``silence``: seconds since the orchestrator was last heard. ``own_inbox``: the inbox for this
    host's own copy of an image, None if it takes none.
    """

    def __init__(
        self,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        silence: Callable[[], float],
        own_inbox: Callable[[str], Inbox | None],
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._sessions = registry.snapshots
        self._silence = silence
        self._own_inbox = own_inbox

    # ---- requests of the orchestrator ----------------------------------------------------------

    async def start(self, request: messages.StartSnapshot) -> messages.Moved:
        """Begin a session, and send what can go ahead; an earlier session of the capsule ends."""
        asked = time.monotonic()
        ahead = _ahead(request)
        criu = self._registry.dumper()  # refuse now, not at the boundary
        await self._sessions.make_way(self._registry.free(request.capsule))
        devices = await self._devices(request)
        resident = self._registry.free(request.capsule)  # again: a migration may have begun

        def make(tracker: CapsuleTracker) -> OutgoingSnapshot:
            registry, image = self._registry, request.image
            sender = registry.open_sender(image, request.holder, request.endpoint)
            wire = self._with_copy(request, sender)
            factory = self._capsule_table.factory
            return OutgoingSnapshot(
                image,
                resident,
                factory,
                wire,
                tracker,
                devices,
                request.gpus,
                protected=request.newest > 0,
                ordered=request.ordered,
            )

        snapshot = self._sessions.begin(resident, make)
        return await asyncio.to_thread(snapshot.send_ahead, ahead, asked, criu)

    async def lock(self, request: messages.LockCapsule) -> None:
        self._registry.running(request.capsule)
        snapshot = self._of(request.image, request.capsule)
        snapshot.check_may_lock()
        _need_ranks(snapshot.resident)
        await self._capsule_table.hold_signals(snapshot.resident)
        await asyncio.to_thread(snapshot.lock, request.deadline)

    async def dump(self, request: messages.DumpCapsule) -> messages.Frozen:
        criu = self._registry.dumper()
        snapshot = self._of(request.image, request.capsule)
        return await asyncio.to_thread(snapshot.dump, criu, request.deadline)

    async def thaw(self, request: messages.ThawCapsule) -> None:
        """Return once the capsule runs. The session is closed in the background."""
        snapshot = self._sessions.find(request.image, request.capsule)
        if snapshot is not None:
            await asyncio.to_thread(snapshot.thaw)

    async def seal(self, request: messages.SealSnapshot) -> messages.SnapshotClosed:
        snapshot = self._of(request.image, request.capsule)
        digest = await asyncio.to_thread(snapshot.seal)
        _need_ranks(snapshot.resident)  # one may have ended between the lock and the freeze
        return messages.SnapshotClosed(digest)

    async def close(self, request: messages.CloseSnapshot) -> messages.SnapshotClosed:
        snapshot = self._sessions.find(request.image, request.capsule)
        if snapshot is None:
            return messages.SnapshotClosed(b"")
        await asyncio.to_thread(snapshot.close)
        if snapshot.early:
            raise StepFailed(
                "snapshot",
                f"{request.capsule} went on by itself, perhaps before all of its job was dumped",
            )
        _need_ranks(snapshot.resident)  # one may have ended between the lock and the freeze
        return messages.SnapshotClosed(snapshot.digest)

    async def end_earlier(self, request: messages.EndEarlier) -> messages.EarlierEnded:
        """The book itself ends the copies (CapsuleTable.locate)."""
        await self._capsule_table.locate(messages.Locate(request.book))
        await reached("rewind.ended")
        return messages.EarlierEnded(self._capsule_table.ended_running(request.book))

    async def end(self, request: messages.End) -> None:
        """End a capsule. A snapshot of it is given up first, without a wait."""
        self._sessions.abandon(request.capsule)
        await self._capsule_table.end_capsule(request)

    def _with_copy(self, request: messages.StartSnapshot, sender: Sender) -> OutgoingWire:
        """Return a wire to the holder. If the orchestrator has asked for a copy, this host gets all
        that goes over the wire, too."""
        inbox = self._own_inbox(request.image) if request.own is not None else None
        if inbox is None:
            return OutgoingWire(sender, self._registry.open_lanes, _no_report)
        copy = OwnCopy(request.image, inbox)
        sender.also = copy.stream

        def open_lanes(beside: Sender) -> Lanes:
            lanes = self._registry.open_lanes(beside)
            lanes.also = copy.pages
            return lanes

        return OutgoingWire(sender, open_lanes, _no_report, copy.give_up)

    async def _devices(self, request: messages.StartSnapshot) -> DeviceTree | None:
        """The CUDA processes of a capsule that uses GPUs. Raises Refused without a GPU helper."""
        if not request.gpus:  # a hung GPU must not delay a CPU job
            return None
        resident = self._registry.free(request.capsule)
        devices = await asyncio.to_thread(
            self._registry.devices.tree, request.image, resident, plain=PLAIN
        )
        if devices is None:
            raise Refused(
                f"{request.capsule} uses a GPU, and {self._capsule_table.host} has no GPU helper",
                hint="its log is gpu-helper.log in the run directory",
            )
        return devices

    def _of(self, image: str, capsule: str) -> OutgoingSnapshot:
        """The snapshot; raises NotFound if this agent has no such session, for example because it
        was restarted: then the capsule was unlocked meanwhile."""
        snapshot = self._sessions.find(image, capsule)
        if snapshot is None:
            raise NotFound(f"{self._capsule_table.host} has no snapshot {image} of {capsule}")
        return snapshot

    # ---- without requests ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Give snapshots up while the orchestrator is silent, as gates are opened then. End the
        sessions of capsules that are gone."""
        await asyncio.gather(self._watch_silence(), self._end_gone())

    async def _watch_silence(self) -> None:
        timeouts = self._capsule_table.cluster.timeouts
        while True:
            await asyncio.sleep(timeouts.heartbeat)
            if self._silence() > 2 * timeouts.suspicion and self._sessions.busy:
                log.warning("the orchestrator is silent, so snapshots are given up")
                self._sessions.abandon_all()

    async def _end_gone(self) -> None:
        while True:
            await asyncio.sleep(self._capsule_table.cluster.timeouts.heartbeat)
            await self._sessions.end_gone(self._capsule_table.capsules)


def _need_ranks(resident: RunningCapsule) -> None:
    """Raise StepFailed if a rank has ended badly: torchrun needs seconds to notice that, and would
    then end in every rewind to such an image."""
    if (end := resident.deaths.first) is not None:
        how = f" by {signal.Signals(end.signal).name}" if end.signal else ""
        raise StepFailed("snapshot", f"a rank of {resident.spec.name} has ended{how}")


def _ahead(request: messages.StartSnapshot) -> Ahead:
    return Ahead(
        image_number(request.image),
        request.holder,
        request.base,
        request.least,
        request.own,
        request.deadline,
    )


def _no_report(_report: messages.Progressed) -> None:
    """No request asks for the progress of a snapshot: the job trains."""
