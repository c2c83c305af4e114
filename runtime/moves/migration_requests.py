# SPDX-License-Identifier: Apache-2.0
"""Answers the requests about migrations: begin or plan one, cancel one, show one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from ...errors import LiveshiftError, NotFound, Refused, WrongUsage
from ...texts import shortened
from .. import messages
from ..config.access import Principal, Role, refusal
from ..config.choices import Way
from ..fleet.agents import Agents
from ..fleet.fleet import Fleet
from ..fleet.rights import Rights
from ..messages import Message
from ..migration.host_migration import HostMigration
from ..migration.order import Order
from ..model.gpu_asked import asked
from ..model.steps import MigrationStep
from .evacuation import Evacuation
from .migration_service import MigrationService
from .planning import MigrationPlanner


@dataclass
class MigrationRequests:
    """The ApiServer has one instance. Each public method answers one kind of request, for the
    caller ``who``. It raises NotFound for an unknown capsule or migration, NotPermitted if ``who``
    may not do that, and Refused or WrongUsage if the request cannot be met."""

    _fleet: Fleet
    _rights: Rights
    _agents: Agents
    _planner: MigrationPlanner
    _migrations: MigrationService
    _evacuation: Evacuation

    async def migrate(self, who: Principal, request: messages.Migrate) -> Message:
        job = self._rights.job_of(who, request.capsule)
        if not who.owns(job.uid) and not self._rights.rules(who, request.capsule):
            self._rights.need(who, Role.OPERATE, f"move {request.capsule}", job)
        capsule = job.capsule(request.capsule)
        if request.way and request.way not in set(Way):
            raise Refused(
                f'there is no way "{request.way}" to move memory', hint=f"ways: {', '.join(Way)}"
            )
        within = request.within if request.within > 0 else None
        gpu = asked(request, capsule)
        order = Order(
            job,
            capsule,
            request.to if gpu is None else gpu.host,
            shortened(request.reason) or "asked for",
            who.shown,
            gpu,
            request.verify,
            request.way,
            None if within is None else time.monotonic() + within,
        )
        if order.is_swap and (request.way or within):
            raise WrongUsage(
                f"{request.capsule} stays on {capsule.host}: neither a way nor a deadline goes"
                " with that",
                hint="leave --way and --within out, or name a GPU of another host",
            )
        if request.dry_run:
            return await self._planner.plan(order, within)
        return messages.Named(self._migrations.start(order).name)

    async def cancel(self, who: Principal, request: messages.Cancel) -> None:
        row = (await self.get_migration(who, messages.GetMigration(request.name))).row
        migration = self._fleet.migrations.get(request.name)
        if migration is None:
            raise Refused(f"{request.name} is over: {row.state}")
        if not who.owns(migration.job.uid) and not self._rights.rules(who, row.capsule):
            self._rights.need(who, Role.OPERATE, f"cancel {request.name}", migration.job)
        migration.cancel(who.shown)
        self._evacuation.leave(migration.capsule)

    async def get_migration(
        self, who: Principal, request: messages.GetMigration
    ) -> messages.MigrationDetails:
        migration = self._fleet.migrations.get(request.name)
        if migration is None:
            row = self._fleet.journal.migration_named(request.name)
            if row is None:
                raise NotFound(
                    f'no migration "{request.name}"', hint="`liveshift events` lists them"
                )
            begun = self._fleet.journal.begun_by(int(row.name.removeprefix("m")))
            if not self._rights.saw(who, row.capsule, begun):
                raise refusal(who, f"see {request.name}", Role.VIEW, f"it moved {row.capsule}")
            return messages.MigrationDetails(row)
        if not self._rights.sees(who, migration.job):
            self._rights.need(who, Role.VIEW, f"see {request.name}", migration.job)
        if isinstance(migration, HostMigration) and migration.step in (
            MigrationStep.PRECOPYING,
            MigrationStep.QUIESCING,
            MigrationStep.FREEZING,
        ):
            with contextlib.suppress(LiveshiftError):
                progress = messages.Progress(migration.name)
                seen = await self._agents.request(migration.destination, progress, 2)
                if isinstance(seen, messages.Arrived):
                    migration.times.bytes = seen.bytes
        return messages.MigrationDetails(migration.row())
