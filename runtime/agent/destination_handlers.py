# SPDX-License-Identifier: Apache-2.0
"""A host as the destination of migrations: it answers the orchestrator's requests, from the
reservation to the first collective after the restore.

arrival/incoming_migration.py does the work. rulings.py ends migrations that end in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections import defaultdict
from typing import Protocol

from ...criu_glue.memory.source.tracker import MemoryTracker
from ...errors import NotFound, Refused
from .. import messages
from ..cost.model import LEAST_IDLE
from ..daemon.faultpoints import reached
from ..daemon.tasks import Tasks
from ..model import host_versions
from ..model.snapshots import is_restore_name
from ..model.stopwatch import Stopwatch
from ..wire import LANES
from . import preflight
from .arrival.incoming_migration import IncomingMigration
from .arrival.restore_attempt import RestoreAttempt, SendClaim
from .gpu.devices import DeviceTree
from .gpu.preflight import GpuPlan
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.finished_operations import finished_by_pid
from .host.measures import Measures
from .host.running_capsule import RunningCapsule
from .migration_registry import POLL_S, MigrationRegistry
from .rulings import Rulings

log = logging.getLogger("liveshift.destination")

FREE_AFTER_S = 1.0
RARE_S = 0.5
"""If no collective has come after this many seconds, collectives are rare, and time on a core also
counts as progress."""
COMPUTES_S = 0.01
"""A job with rare collectives counts as running once its threads have spent this many seconds on a
core in all."""


class OwnCopies(Protocol):
    """The copies that this host keeps of its own capsules' images (holding_handlers.py). Memory for
    a capsule that comes goes before them."""

    def own_bytes(self, besides: str = "", staying: str = "") -> int: ...
    def make_room(self, needed: int, besides: str, staying: str = "") -> None: ...


class ArrivingGates(Protocol):
    """The gates of this host's ranks (gate_handlers.py)."""

    async def arrive(self, job: str, hold: float) -> None: ...


class DestinationHandlers:
    """Answers Reserve, Progress, RestoreCapsule, Forward and Resume."""

    def __init__(
        self,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        rulings: Rulings,
        send_claim: SendClaim,
        measures: Measures,
        copies: OwnCopies,
        gates: ArrivingGates,
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._rulings = rulings
        self._send_claim = send_claim
        self._measures = measures
        self._copies = copies
        self._gates = gates
        self._own = capsule_table.cluster.host(capsule_table.host)
        self._tasks = Tasks()
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by capsule
        self._closing: dict[str, asyncio.Future[None]] = {}  # by migration

    def memory_offered(self, gives_way: int) -> int:
        """Bytes that an incoming capsule may use. ``gives_way``: bytes that copies of this host's
        own capsules take (OwnCopies.own_bytes)."""
        return host_facts.memory_offered(self._own.memory, gives_way)

    async def reserve(self, request: messages.Reserve) -> messages.Reserved:
        if not request.dry_run:
            await self._take_away_stale(request.spec.name)
        async with self._registry.reservations.making(request) as gpus:
            return await self._reserve(request, gpus)

    async def _reserve(self, request: messages.Reserve, gpus: GpuPlan) -> messages.Reserved:
        facts, criu = self._registry.facts, self._registry.criu
        here = request.source == self._capsule_table.host  # a held image, which is lent
        lent = request.spec.name if here else ""
        sent = request.spec.name if is_restore_name(request.migration) and not here else ""
        gives_way = await asyncio.to_thread(self._copies.own_bytes, lent, sent)
        offered = self.memory_offered(gives_way)
        images = self._capsule_table.cluster.paths.run / "images"
        if full_dump := MemoryTracker.probe():
            full_dump = f"{self._capsule_table.host}: {full_dump}"
        ahead = not (request.full_dump or full_dump)
        rows = await asyncio.to_thread(
            preflight.check,
            request.survey,
            request.facts,
            facts,
            criu,
            offered,
            gpus,
            ahead=ahead,
            host=self._capsule_table.host,
            capsules=self._capsule_table.cluster.paths.state,
            images=None if here else images,
            gives_way=gives_way,
        )
        warnings = host_versions.warnings(request.facts, facts, self._capsule_table.host)
        if request.dry_run:
            cores = await asyncio.to_thread(self._capsule_table.idle.cores)
            return messages.Reserved(
                rows, "", gpus.pairs, gpus.plain, full_dump, cores=cores, warnings=warnings
            )
        name = request.spec.name
        self._refuse_late(request)
        image = request.survey.resident + request.survey.shared_memory
        await asyncio.to_thread(self._copies.make_room, image if here else 2 * image, lent, sent)
        await self._capsule_table.make_way(request.book)
        async with self._building[name]:  # a second Reserve waits until this one is undone
            incoming, devices, cores = await self._build(request, gpus)
        self._measures.arriving(request.migration)
        self._registry.receiver.expect(
            request.migration,
            request.source,
            incoming.inbox,
            request.limit_bytes,
            incoming.inbox.pages,
            LANES,
        )
        await asyncio.to_thread(preflight.warm, request.survey.needed)
        if criu is not None:
            await asyncio.to_thread(preflight.warm_tools, criu)
        plain = gpus.plain
        if devices is not None and not plain:
            plain = await asyncio.to_thread(devices.warm, incoming.gpus_promised)
        endpoint = f"tcp://{self._own.data}"
        return messages.Reserved(
            rows, endpoint, gpus.pairs, plain, full_dump, cores=cores, warnings=warnings
        )

    async def _build(
        self, request: messages.Reserve, gpus: GpuPlan
    ) -> tuple[IncomingMigration, DeviceTree | None, messages.Cores]:
        """Build a sandbox and register it. If a rewind of the job comes meanwhile, EndEarlier does
        not see what is not registered: then this raises Refused, and leaves nothing behind."""
        name, registry = request.spec.name, self._registry
        async with self._capsule_table.network:
            self._refuse_late(request)  # again: a rewind may have come since
            resident = await self._capsule_table.blocking(
                name, lambda: self._capsule_table.factory.build_sandbox(request)
            )
        try:
            devices = None
            if request.gpu is not None:
                devices = await asyncio.to_thread(
                    registry.devices.tree, request.migration, resident
                )
            cores = await asyncio.to_thread(self._capsule_table.idle.cores)
            incoming = IncomingMigration(
                request,
                resident,
                self._capsule_table.factory,
                registry.criu,
                devices,
                gpus.pairs,
                idle=cores.idle >= LEAST_IDLE,
            )
            incoming.write_note()
            self._refuse_late(request)  # with no await before it is registered
        except Exception:  # the registry does not know it: no ruling would remove its sandbox
            images = self._capsule_table.factory.images(request.migration)
            await asyncio.to_thread(shutil.rmtree, images, ignore_errors=True)
            async with self._capsule_table.network:
                await self._capsule_table.blocking(name, resident.remove)
            raise
        registry.incoming[request.migration] = incoming
        return incoming, devices, cores

    def _refuse_late(self, request: messages.Reserve) -> None:
        """Raise Refused if the capsule may not come any more, or is here already."""
        name, host = request.spec.name, self._capsule_table.host
        self._capsule_table.refuse_older(request)
        here = self._capsule_table.capsules.get(name)
        if here is not None and here.code is None:
            raise Refused(f"{name} is on {host} already")

    async def _take_away_stale(self, name: str) -> None:
        """Remove what earlier migrations left of the capsule; raises Refused if one is not over.

        One that is over may be in removal at this moment; this waits until that is complete.
        """
        incoming = self._registry.incoming
        for stale in [m for m, i in incoming.items() if i.resident.spec.name == name]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._capsule_table.cluster.timeouts.prepare / 2):
                    await self._registry.until_idle(stale)
            if await self._rulings.claim(stale) == "held":
                raise Refused(
                    f"{name} is arriving on {self._capsule_table.host} already, by {stale}"
                )

    async def progress(self, request: messages.Progress) -> messages.Arrived:
        incoming = self._registry.incoming.get(request.migration)
        if incoming is None:
            return messages.Arrived(0, 0, False)
        making_room = False
        if request.close and not incoming.complete:
            await self._close(incoming)
        else:
            making_room = await asyncio.to_thread(incoming.inbox.make_room, request.stop)
        size = incoming.inbox.manifest.image_bytes if incoming.complete else 0
        received = self._registry.receiver.received(request.migration)
        placed, placing = incoming.placed
        return messages.Arrived(received, size, incoming.complete, placed, placing or making_room)

    async def _close(self, incoming: IncomingMigration) -> None:
        """Close an inbox. A repeated request waits for the first one: a disk that hangs in the
        middle of a stream keeps a thread here, and the orchestrator asks every few seconds."""
        name = incoming.migration
        if (closing := self._closing.get(name)) is None:
            closing = asyncio.ensure_future(asyncio.to_thread(incoming.inbox.close))
            closing.add_done_callback(lambda _: self._closing.pop(name, None))
            self._closing[name] = closing
        await asyncio.shield(closing)

    async def restore(self, request: messages.RestoreCapsule) -> messages.Moved:
        """Restore, claim, run. A repeated request succeeds too if the capsule runs or soon will."""
        registry, name, migration = self._registry, request.capsule, request.migration
        await registry.until_idle(migration)  # an earlier such request, whose caller gave up
        here = self._capsule_table.capsules.get(name)
        if here is not None and here.epoch == request.epoch and migration not in registry.incoming:
            return messages.Moved(0, [])
        incoming = registry.incoming.get(migration)
        if incoming is None:
            raise NotFound(f"{self._capsule_table.host} has no image of {name} (any more)")
        incoming.check_may_restore(request.epoch)
        assert registry.criu is not None  # the preflight has checked this
        with registry.working(migration):
            attempt = RestoreAttempt(incoming, self._capsule_table, self._send_claim, registry.criu)
            moved = await attempt.run(request)
            self._capsule_table.admit(incoming.resident)
            del registry.incoming[migration]
        # In the background: the job is paused until its gates are opened here.
        self._tasks.spawn(self._gates.arrive(incoming.resident.spec.job, request.hold))
        self._tasks.spawn(asyncio.to_thread(self._measures.runs, migration, incoming.resident))
        await reached("destination.running")
        registry.receiver.forget(migration)
        self._tasks.spawn(self._free_memory(incoming))
        return moved

    async def _free_memory(self, incoming: IncomingMigration) -> None:
        """Free the image's memory after a delay. Freeing keeps other threads from mapping memory
        for some 50 ms per GB, and the job is paused until its gates are opened here."""
        await asyncio.sleep(FREE_AFTER_S)
        await asyncio.to_thread(incoming.free_images)

    async def forward(self, request: messages.Forward) -> messages.Frozen:
        """Send an image that could not be restored here to another spare."""
        await self._registry.until_idle(request.migration)
        incoming = self._registry.incoming.get(request.migration)
        if incoming is None or not incoming.complete:
            raise NotFound(f"{self._capsule_table.host} has no image of {request.capsule}")
        registry, migration, to = self._registry, request.migration, request.destination
        with (
            contextlib.closing(registry.open_sender(migration, to, request.endpoint)) as sender,
            contextlib.closing(registry.open_lanes(sender)) as lanes,
            registry.working(migration),
        ):
            return await self._capsule_table.blocking(
                request.capsule, lambda: incoming.forward(sender, lanes)
            )

    async def resume(self, request: messages.Resume) -> messages.Moved:
        """Wait until the job makes progress here: its first collective, or, if that does not come
        soon, time that its threads spend on a core."""
        resident = self._capsule_table.resident(request.capsule)
        watch_ = Stopwatch()
        with watch_.phase("resume") as lap:
            lap.detail = await self._first_progress(resident, request.deadline)
        return messages.Moved(0, watch_.phases)

    async def _first_progress(self, resident: RunningCapsule, limit: float) -> str:
        """Return once the job goes on, or after ``limit`` seconds; return what was seen."""
        before = resident.finished or finished_by_pid(resident.sandbox)
        began = time.monotonic()
        soon, until = began + RARE_S, began + limit
        if not any(before.values()):
            return "no collectives in this job"
        ran = await asyncio.to_thread(resident.ran_s)
        while True:
            seen = finished_by_pid(resident.sandbox, before)
            if any(seen.get(pid, 0) > count for pid, count in before.items()):
                return "until the first collective"
            if resident.code is not None:
                return "its command ended before the next collective"
            now = time.monotonic()
            if now > soon:
                if await asyncio.to_thread(resident.ran_s) - ran >= COMPUTES_S:
                    return f"it computes; no collective within {now - began:.1f} s"
                soon = now + RARE_S
            if now > until:
                return f"no collective within {limit:g} s"
            await asyncio.sleep(POLL_S)
