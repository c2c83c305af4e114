# SPDX-License-Identifier: Apache-2.0
"""A host as the destination of migrations: it answers the orchestrator's asks, from the reservation
to the first collective after the restore.

arrival.py does the work. The porter settles arrivals that end in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ...criu_glue.criu.tool import Criu
from ...criu_glue.memory.source.tracker import MemoryTracker
from ...errors import LiveshiftError, NotFound, Refused, StepFailed
from .. import messages
from ..daemon.faultpoints import reached
from ..daemon.tasks import Tasks
from ..model.ownership import Ruling, Side
from ..model.stopwatch import Stopwatch
from ..wire import LANES
from . import preflight
from .arrival.incoming_migration import IncomingMigration
from .gpu.preflight import GpuPlan
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.measures import Measures
from .host.running_capsule import RunningCapsule, finished_by_pid
from .migration_registry import POLL_S, MigrationRegistry

log = logging.getLogger("liveshift.destination")

FREE_AFTER_S = 1.0
RARE_S = 0.5
"""Seconds. If no collective has come by then, collectives are rare, and time on a core also counts
as progress."""
COMPUTES_S = 0.01
"""Seconds on a core, of all threads together, that show that a job with rare collectives runs."""


class DestinationHandlers:
    """Answers Reserve, Progress, Restore, Forward and Resume."""

    def __init__(
        self, capsule_table: CapsuleTable, registry: MigrationRegistry, measures: Measures
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._measures = measures
        self._own = capsule_table.cluster.host(capsule_table.host)
        self._tasks = Tasks()

    def memory_offered(self) -> int:
        """Bytes that an incoming capsule may use."""
        return host_facts.memory_offered(self._own.memory)

    async def reserve(self, ask: messages.Reserve) -> messages.Reserved:
        if not ask.dry_run:
            await self._take_away_stale(ask.spec.name)
        async with self._registry.reservations.making(ask) as gpus:
            return await self._reserve(ask, gpus)

    async def _reserve(self, ask: messages.Reserve, gpus: GpuPlan) -> messages.Reserved:
        offered, facts, criu = self.memory_offered(), self._registry.facts, self._registry.criu
        if full_dump := MemoryTracker.probe():
            full_dump = f"{self._capsule_table.host}: {full_dump}"
        ahead = not (ask.full_dump or full_dump)
        rows = await asyncio.to_thread(
            preflight.check,
            ask.survey,
            ask.facts,
            facts,
            criu,
            offered,
            gpus,
            ahead=ahead,
            host=self._capsule_table.host,
            capsules=self._capsule_table.cluster.paths.state,
            images=self._capsule_table.cluster.paths.run / "images",
        )
        if ask.dry_run:
            cores = await asyncio.to_thread(self._capsule_table.idle.cores)
            return messages.Reserved(rows, "", gpus.pairs, gpus.plain, full_dump, cores=cores)
        name = ask.spec.name
        self._capsule_table.refuse_older(ask)
        if name in self._capsule_table.capsules and self._capsule_table.capsules[name].code is None:
            raise Refused(f"{name} is on {self._capsule_table.host} already")
        await self._capsule_table.make_way(ask.book)
        async with self._capsule_table.network:
            resident = await self._capsule_table.blocking(
                name, lambda: self._capsule_table.factory.capsule_table_empty(ask)
            )
        devices = None
        if ask.gpu is not None:
            devices = await asyncio.to_thread(self._registry.devices.tree, ask.migration, resident)
        arrival = IncomingMigration(ask, resident, self._capsule_table.factory, devices, gpus.pairs)
        arrival.note()
        self._measures.arriving(ask.migration)
        if criu is not None:
            arrival.start_early(criu)
        self._registry.arrivals[ask.migration] = arrival
        self._registry.receiver.expect(
            ask.migration, ask.source, arrival.inbox, ask.limit_bytes, arrival.inbox.pages, LANES
        )
        await asyncio.to_thread(preflight.warm, ask.survey.needed)
        if criu is not None:
            await asyncio.to_thread(preflight.warm_tools, criu)
        plain = gpus.plain
        if devices is not None and not plain:
            plain = await asyncio.to_thread(devices.warm, arrival.gpus_promised)
        here = f"tcp://{self._own.data}"
        cores = await asyncio.to_thread(self._capsule_table.idle.cores)
        return messages.Reserved(rows, here, gpus.pairs, plain, full_dump, cores)

    async def _take_away_stale(self, name: str) -> None:
        """Remove what earlier migrations left of the capsule; raises Refused if one is not over.

        One that is over may be in removal at this moment; this waits until that is complete.
        """
        arrivals = self._registry.arrivals
        for stale in [m for m, a in arrivals.items() if a.resident.spec.name == name]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._capsule_table.cluster.timeouts.prepare / 2):
                    await self._registry.idle(stale)
            if await self._registry.ask_about(stale) == "held":
                raise Refused(
                    f"{name} is arriving on {self._capsule_table.host} already, by {stale}"
                )

    async def progress(self, ask: messages.Progress) -> messages.Arrived:
        arrival = self._registry.arrivals.get(ask.migration)
        if arrival is None:
            return messages.Arrived(0, 0, False)
        making_room = False
        if ask.close and not arrival.complete:
            await asyncio.to_thread(arrival.inbox.close)
        else:
            making_room = await asyncio.to_thread(arrival.inbox.make_room, ask.stop)
        size = arrival.inbox.manifest.image_bytes if arrival.complete else 0
        taken = self._registry.receiver.received(ask.migration)
        placed, placing = arrival.placed
        return messages.Arrived(taken, size, arrival.complete, placed, placing or making_room)

    async def restore(self, ask: messages.RestoreCapsule) -> messages.Moved:
        """Restore, ask, run. A repeated ask succeeds too if the capsule runs or is on its way."""
        name, migration = ask.capsule, ask.migration
        await self._registry.idle(migration)  # an earlier ask for the same, whose caller gave up
        here = self._capsule_table.capsules.get(name)
        if (
            here is not None
            and here.epoch == ask.epoch
            and migration not in self._registry.arrivals
        ):
            return messages.Moved(0, [])
        arrival, criu = self._registry.arrivals.get(migration), self._registry.criu
        if arrival is None or not arrival.sandbox_stands:
            raise NotFound(f"{self._capsule_table.host} has no image of {name} (any more)")
        assert criu is not None  # the preflight has checked this
        if ask.epoch <= arrival.failed_epoch:
            raise StepFailed("restore", f"the attempt under epoch {ask.epoch} has failed")
        if arrival.used_up:
            raise NotFound(
                f"the image of {name} on {self._capsule_table.host} was used up by an attempt that"
                f" failed: {arrival.failed}"
            )
        with self._registry.working(migration):
            try:
                moved = await self._restore(arrival, criu, ask)
            except BaseException as error:
                arrival.failed_epoch = max(arrival.failed_epoch, ask.epoch)
                arrival.failed = str(error)
                raise
            self._capsule_table.admit(arrival.resident)
            del self._registry.arrivals[migration]
        # In the background: the job is paused until its gates are opened here.
        self._tasks.spawn(asyncio.to_thread(self._measures.runs, migration, arrival.resident))
        await reached("destination.running")
        self._registry.receiver.forget(migration)
        self._tasks.spawn(self._free_memory(arrival))
        return moved

    async def _free_memory(self, arrival: IncomingMigration) -> None:
        """Free the image's memory after a delay. Freeing keeps other threads from mapping memory
        for some 50 ms per GB, and the job is paused until its gates are opened here."""
        await asyncio.sleep(FREE_AFTER_S)
        await asyncio.to_thread(arrival.free_images)

    async def _restore(
        self, arrival: IncomingMigration, criu: Criu, ask: messages.RestoreCapsule
    ) -> messages.Moved:
        name, watch = ask.capsule, Stopwatch()
        # While CRIU works: the commit gave us the address, whether this attempt succeeds or not.
        located = asyncio.ensure_future(self._capsule_table.locate(arrival.here(ask.epoch)))
        try:
            await self._capsule_table.blocking(
                name, lambda: arrival.bring_up(criu, watch, ask.deadline)
            )
        finally:
            await asyncio.wait({located})
        if (error := located.exception()) is not None:
            await self._capsule_table.blocking(name, arrival.drop_tree)
            raise StepFailed("restore", f"its address could not be located here: {error}")
        await reached("destination.claiming")
        with watch.phase("grant", frozen=True):
            await self._may_run(arrival, ask.epoch)
        arrival.resident.finished = finished_by_pid(arrival.resident.sandbox)
        return await self._capsule_table.blocking(
            name, lambda: arrival.let_run(watch, ask.epoch, ask.deadline)
        )

    async def forward(self, ask: messages.Forward) -> messages.Frozen:
        """Send an image that could not be restored here to another spare."""
        await self._registry.idle(ask.migration)
        arrival = self._registry.arrivals.get(ask.migration)
        if arrival is None or not arrival.complete:
            raise NotFound(f"{self._capsule_table.host} has no image of {ask.capsule}")
        sender = self._registry.sender(ask)
        lanes = self._registry.lanes(sender)
        try:
            with self._registry.working(ask.migration):
                return await self._capsule_table.blocking(
                    ask.capsule, lambda: arrival.forward(sender, lanes)
                )
        finally:
            lanes.close()
            sender.close()

    async def _may_run(self, arrival: IncomingMigration, epoch: int) -> None:
        """Return when the tree may run; if it may not, drop the tree and raise StepFailed.

        This never gives up by itself: a lost answer does not mean that there was none.
        """
        name = arrival.resident.spec.name
        claim = messages.Claim(arrival.migration, name, Side.COMING.value, epoch, ready=True)
        while True:
            try:
                ruled = await self._registry.claim(claim)
            except LiveshiftError as error:
                log.warning("%s: may %s run here? %s", arrival.migration, name, error)
                continue
            ruling = Ruling(ruled.ruling)
            if ruling is Ruling.RUN:
                arrival.granted = epoch
                return
            if ruling is Ruling.END or ruled.epoch > epoch:  # another attempt is under way
                await self._capsule_table.blocking(name, arrival.drop_tree)
                raise StepFailed(
                    "restore", f"{name} may not run on {self._capsule_table.host} any more"
                )
            await asyncio.sleep(self._capsule_table.cluster.timeouts.heartbeat)

    async def resume(self, ask: messages.Resume) -> messages.Moved:
        """Wait until the job makes progress here: its first collective, or, if that does not come
        soon, time that its threads spend on a core."""
        resident = self._capsule_table.resident(ask.capsule)
        watch_ = Stopwatch()
        with watch_.phase("resume") as lap:
            lap.detail = await self._first_progress(resident, ask.deadline)
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
            seen = finished_by_pid(resident.sandbox)
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
