# SPDX-License-Identifier: Apache-2.0
"""A host as the source of migrations: it answers the orchestrator's requests to survey, pre-copy
and freeze. departure/outgoing_migration.py does the work; rulings.py brings it to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from ...criu_glue.capsule import output
from ...criu_glue.capsule.sandboxes import SandboxPlan
from ...criu_glue.survey import along, connections
from ...criu_glue.survey.found import Along, Footprint, Survey
from ...errors import NotFound
from .. import messages
from . import files_along, preflight
from .departure.forecast import forecast_memory, room_for_copies
from .departure.outgoing_memory import OutgoingWire
from .departure.outgoing_migration import OutgoingMigration
from .host.capsule_table import CapsuleTable
from .host.measures import Measures
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry


class SourceHandlers:
    """Answers Inspect, StartPrecopy, EndSooner and Freeze."""

    def __init__(
        self,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        measures: Measures,
        report: Callable[[messages.Progressed], None],
        own_bytes: Callable[[], int],
    ) -> None:
        """``report`` sends a progress report to the orchestrator, or loses it; any thread may call
        it. ``own_bytes``: as in OwnCopies."""
        self._capsule_table = capsule_table
        self._registry = registry
        self._measures = measures
        # By capsule, from its last inspection; None: the capsule uses no GPU.
        self._gpus_used: dict[str, list[str] | None] = {}
        self._report = report
        self._own_bytes = own_bytes

    async def inspect(self, request: messages.Inspect) -> messages.Inspected:
        resident = self._registry.free(request.capsule)
        criu = self._registry.dumper()  # refuse before a plan promises a move that cannot happen
        await asyncio.to_thread(preflight.warm_tools, criu)
        found = await self._registry.surveyed(resident)
        plan = resident.sandbox.plan
        found = await asyncio.to_thread(self._with_files, found, plan)
        carried = sum(each.size for each in found.along) + found.output
        await self._registry.until_on_gpus(request.capsule)
        gpu = await asyncio.to_thread(self._registry.reservations.survey, resident, found)
        self._gpus_used[request.capsule] = list(gpu.used) if gpu else None
        settings = self._capsule_table.cluster.precopy

        def forecast() -> tuple[Footprint, messages.Writing | None, str]:
            # It is free still: two measurements at once would hide writes from each other.
            self._registry.free(request.capsule)
            room = room_for_copies(self._own_bytes()) if request.snapshot else 0
            host = self._capsule_table.host
            return forecast_memory(host, resident, settings, request.watch, room)

        async with AsyncExitStack() as alone:
            if request.watch:  # only one can follow its memory
                sessions = self._registry.snapshots
                await alone.enter_async_context(sessions.forecast(request.capsule))
            size, writing, full = await self._capsule_table.blocking(request.capsule, forecast)
        breaks = await asyncio.to_thread(self._breaks, resident)
        return messages.Inspected(
            found,
            self._registry.facts,
            carried,
            gpu,
            size,
            writing,
            full,
            breaks,
            await asyncio.to_thread(self._capsule_table.idle.cores),
        )

    def _breaks(self, resident: RunningCapsule) -> list[str]:
        """The connections that a move breaks, in words."""
        cluster, overlay = self._capsule_table.cluster, resident.overlay
        near = [str(cluster.overlay), *(host.address for host in cluster.hosts)]
        if cluster.relay:  # a relay keeps the connections to the world
            near = ["0.0.0.0/0", "::/0"]
        return list(map(str, connections.outside(resident.sandbox, near, overlay.gateway)))

    async def precopy(self, request: messages.StartPrecopy) -> messages.Moved:
        asked = time.monotonic()
        criu = self._registry.dumper()
        outgoing = await self._begin(request)
        with self._registry.working(request.migration):
            # No snapshot begins from here on, since the registry has the migration.
            await self._registry.snapshots.end(request.capsule)
            moved = await self._capsule_table.blocking(
                request.capsule, lambda: outgoing.precopy(request, asked, criu)
            )
            breaks = await asyncio.to_thread(self._breaks, outgoing.resident)
            return msgspec.structs.replace(moved, outside=breaks)

    async def _begin(self, request: messages.StartPrecopy) -> OutgoingMigration:
        registry, gpus = self._registry, self._gpus_used.get(request.capsule)
        resident, devices = registry.free(request.capsule), None
        if gpus is not None:  # a hung GPU must not delay a CPU job
            devices = await asyncio.to_thread(
                registry.devices.tree,
                request.migration,
                resident,
                full=request.verify,
                plain=request.plain,
            )
            resident = registry.free(request.capsule)  # again: another migration may have begun
        sender = registry.open_sender(request.migration, request.destination, request.endpoint)
        wire = OutgoingWire(sender, registry.open_lanes, self._report)
        outgoing = OutgoingMigration(
            request.migration, resident, self._capsule_table.factory, wire, devices, gpus or []
        )
        registry.outgoing[request.migration] = outgoing
        return outgoing

    async def end_sooner(self, request: messages.EndSooner) -> None:
        for outgoing in self._registry.outgoing.values():
            if outgoing.resident.spec.name == request.capsule:
                outgoing.end_sooner(request.sooner)

    async def freeze(self, request: messages.Freeze) -> messages.Frozen:
        criu, outgoing = self._registry.dumper(), self._registry.outgoing.get(request.migration)
        self._registry.running(request.capsule)
        if outgoing is None:
            raise NotFound(f"{self._capsule_table.host} knows no migration {request.migration}")
        outgoing.check_may_freeze()  # a second Freeze must not end the first one's "working"
        with self._registry.working(request.migration):
            await self._capsule_table.hold_signals(outgoing.resident)

            def freeze() -> messages.Frozen:
                self._measures.stops(request.migration)
                return outgoing.freeze(criu, request.deadline)

            try:
                return await self._capsule_table.blocking(request.capsule, freeze)
            finally:
                self._measures.sent(request.migration, outgoing.sent)

    def _with_files(self, found: Survey, plan: SandboxPlan) -> Survey:
        limits, going = self._capsule_table.cluster.timeouts, self._along(plan.tmp)
        return replace(
            found,
            along=going,
            output=output.size(plan.log),
            single_size=along.size_of(found.single_files),
            problems=found.problems
            + tuple(files_along.too_long(going, limits.precopy - limits.suspicion)),
        )

    def _along(self, tmp: Path) -> tuple[Along, ...]:
        carried = self._capsule_table.factory.placement.carried
        measured = (along.measure(path, Path(path)) for path in carried)
        return (along.measure("/tmp", tmp), *measured)
