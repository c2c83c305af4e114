# SPDX-License-Identifier: Apache-2.0
"""A host as the source of migrations: it answers the orchestrator's asks to survey, pre-copy and
freeze. departure.py does the work, and the porter settles how a departure ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from ... import units
from ...criu_glue.capsule import output
from ...criu_glue.capsule.sandboxes import SandboxPlan
from ...criu_glue.criu.tool import Criu
from ...criu_glue.survey import along, connections
from ...criu_glue.survey.found import Along, Footprint, Survey
from ...errors import NotFound, Refused
from .. import messages
from ..config.choices import Way
from ..model import link_rates
from ..model.stopwatch import Stopwatch
from . import files_along, preflight
from .departure import forecast
from .departure.outgoing_migration import OutgoingMigration
from .departure.precopy import PrecopyRounds, full_dump_because
from .departure.progress import RoundsReporter
from .host.capsule_table import CapsuleTable
from .host.measures import Measures
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry

SHORT_LOOK_S = 0.6
"""Seconds of the long look at what a capsule writes, if the choice of a way waits for it."""


class SourceHandlers:
    """Answers Inspect, Precopy, EndSooner and Freeze."""

    def __init__(
        self, capsule_table: CapsuleTable, registry: MigrationRegistry, measures: Measures
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._measures = measures
        # By capsule, from its last inspection; None: the capsule uses no GPU.
        self._gpus_used: dict[str, list[str] | None] = {}
        self.tell: Callable[[messages.Progressed], None] = lambda _word: None
        """Sends a progress report to the orchestrator, or loses it; any thread may call it."""

    async def inspect(self, ask: messages.Inspect) -> messages.Inspected:
        resident = self._registry.free(ask.capsule)
        criu = self._dumper()  # refuse now, before a plan promises a move that cannot happen
        await asyncio.to_thread(preflight.warm_tools, criu)
        found = await self._registry.surveyed(resident)
        plan = resident.sandbox.plan
        found = await asyncio.to_thread(self._with_files, found, plan)
        carried = sum(each.size for each in found.along) + found.output
        gpu = await asyncio.to_thread(self._registry.reservations.survey, resident, found)
        self._gpus_used[ask.capsule] = list(gpu.used) if gpu else None
        settings = self._capsule_table.cluster.precopy

        def look() -> tuple[Footprint, messages.Writing | None, str]:
            self._registry.free(ask.capsule)  # again: two looks would hide writes from each other
            return forecast.look(self._capsule_table.host, resident, settings, ask.watch)

        size, writing, full = await self._capsule_table.blocking(ask.capsule, look)
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

    async def precopy(self, ask: messages.StartPrecopy) -> messages.Moved:
        watch = Stopwatch()  # the orchestrator counts its phases from the request
        self._dumper()
        resident = self._registry.free(ask.capsule)
        sender = self._registry.sender(ask)
        devices = None
        if self._gpus_used.get(ask.capsule) is not None:  # a hung GPU must not delay a CPU job
            devices = await asyncio.to_thread(
                self._registry.devices.tree,
                ask.migration,
                resident,
                full=ask.verify,
                plain=ask.plain,
            )
        departure = OutgoingMigration(
            ask.migration, resident, self._capsule_table.factory, sender, devices
        )
        departure.gpus = self._gpus_used.get(ask.capsule) or []
        self._registry.departures[ask.migration] = departure
        until = watch.began + ask.deadline
        with self._registry.working(ask.migration):
            if devices is not None:
                await asyncio.to_thread(devices.warm, departure.gpus)
            host, cluster, why = (
                self._capsule_table.host,
                self._capsule_table.cluster,
                ask.full_dump,
            )
            why = why or await asyncio.to_thread(full_dump_because, host, resident, cluster.precopy)
            departure.full_dump = why
            if not why:
                reporter = RoundsReporter(self.tell, ask.migration)
                lanes = self._registry.lanes(sender)
                departure.memory = PrecopyRounds(
                    resident, lanes, cluster.precopy, reporter, sender.wants
                )
                with watch.phase("choose") as lap:
                    rate = await asyncio.to_thread(lanes.measure)
                    link_rates.keep(cluster.paths.run, ask.destination, rate)
                    departure.memory.rate = rate
                    reporter.carries = min(rate, link_rates.STANDSTILL)
                    lap.detail = f"the link takes {units.size(rate)}/s"
                    if ask.sooner:
                        departure.memory.end_sooner(watch.began + ask.sooner - time.monotonic())
                    if ask.plan is not None:
                        await self._choose(ask, ask.plan, departure, until)
            moved = await self._capsule_table.blocking(
                ask.capsule, lambda: departure.precopy(until, watch)
            )
            breaks = await asyncio.to_thread(self._breaks, resident)
            chosen = departure.memory.chosen if departure.memory is not None else None
            return msgspec.structs.replace(moved, outside=breaks, chosen=chosen)

    async def _choose(
        self,
        ask: messages.StartPrecopy,
        plan: messages.Situation,
        departure: OutgoingMigration,
        until: float,
    ) -> None:
        """Choose the way of the memory; look at the capsule's writes only if they can matter."""
        memory = departure.memory
        assert memory is not None

        def choose() -> messages.Chosen:
            asked_at = until - ask.deadline
            left = max(0.01, ask.within - (time.monotonic() - asked_at)) if ask.within else 0.0
            return memory.choose(plan, ask.max_pause, left, Way(ask.way))

        if choose().undecided:
            written = await self._capsule_table.blocking(
                ask.capsule,
                lambda: forecast.look_at_writing(departure.resident, 1, SHORT_LOOK_S),
            )
            if written is not None:
                plan = msgspec.structs.replace(plan, written=written)
                choose()

    async def end_sooner(self, ask: messages.EndSooner) -> None:
        for departure in self._registry.departures.values():
            if departure.resident.spec.name == ask.capsule and departure.memory is not None:
                departure.memory.end_sooner(ask.sooner)

    def gates_close(self, job: str) -> None:
        """The job's ranks come to a boundary, so one of its capsules will soon be frozen."""
        for memory in self._ahead(job):
            memory.rest()

    def gates_open(self, job: str) -> None:
        """The job's ranks train on."""
        for memory in self._ahead(job):
            memory.go_on()

    def _ahead(self, job: str) -> list[PrecopyRounds]:
        of_job = [d for d in self._registry.departures.values() if d.resident.spec.job == job]
        return [d.memory for d in of_job if d.memory is not None]

    async def freeze(self, ask: messages.Freeze) -> messages.Frozen:
        criu, departure = self._dumper(), self._registry.departures.get(ask.migration)
        self._registry.running(ask.capsule)
        if departure is None:
            raise NotFound(f"{self._capsule_table.host} knows no migration {ask.migration}")
        with self._registry.working(ask.migration):
            await self._capsule_table.hold_signals(departure.resident)

            def freeze() -> messages.Frozen:
                self._measures.stops(ask.migration)
                return departure.freeze(criu, ask.deadline)

            try:
                return await self._capsule_table.blocking(ask.capsule, freeze)
            finally:
                self._measures.sent(ask.migration, departure.sent)

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

    def _dumper(self) -> Criu:
        if self._registry.criu is None:
            raise Refused(
                f"{self._capsule_table.host} has no CRIU, or one that is too old",
                hint=f"run `liveshift doctor` on {self._capsule_table.host}",
            )
        return self._registry.criu
