# SPDX-License-Identifier: Apache-2.0
"""Begins the migrations of the cluster, and recovers them after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .. import messages
from ..daemon.tasks import Tasks
from ..fleet.fleet import Fleet
from ..messages import MigrationRow
from ..migration.context import MigrationContext
from ..migration.gpu_swap import GpuSwap
from ..migration.host_migration import HostMigration
from ..migration.migration import Migration
from ..migration.migration_records import MigrationRecords
from ..migration.order import Order
from ..model.jobs import Capsule, Job
from ..model.ownership import BEFORE_COMMIT
from ..model.steps import MigrationStep
from .costing import Costing
from .planning import MigrationPlanner

KEPT_MIGRATIONS = 200
"""Memory keeps this many ended migrations; the journal keeps all."""

UNCOMMITTED = frozenset(step.value for step in {*BEFORE_COMMIT, MigrationStep.ROLLING_BACK})


@dataclass
class MigrationService:
    """All migrations of the cluster. ``_on_end`` is called with each migration that has ended."""

    _fleet: Fleet
    _context: MigrationContext
    _planner: MigrationPlanner
    _records: MigrationRecords
    _costing: Costing
    _on_end: Callable[[Migration], Awaitable[None]]
    _tasks: Tasks = field(default_factory=Tasks)

    def start(self, order: Order) -> Migration:
        """Begin to move a capsule to another host, or to another GPU of its host. Raises Refused,
        NotFound or Unreachable; then nothing has begun."""
        order, why = self._planner.resolve(order)
        kind = GpuSwap if order.is_swap else HostMigration
        migration: Migration = kind(self._context, self._fleet.journal.next_migration(), order)
        self._records.begin(migration, why)
        if isinstance(migration, HostMigration):
            self._tasks.spawn(self._costing.begin(migration))
        self._run(migration, migration.run())
        return migration

    def progressed(self, host: str, report: messages.Progressed) -> None:
        """Take a source's report on its pre-copy; a late report changes nothing."""
        migration = self._fleet.migrations.get(report.migration)
        if isinstance(migration, HostMigration) and migration.source == host:
            migration.progressed(report)

    def recover(self) -> None:
        """Continue the migrations that an earlier orchestrator has left under way."""
        journal = self._fleet.journal
        for number, row in journal.migrations_under_way():
            found = self._fleet.find(row.capsule)
            if found is None:
                text = f"the job of {row.capsule} ended while no orchestrator ran"
                journal.end_migration(number, row, MigrationStep.JOB_ENDED, text)
                continue
            migration = self._from_row(*found, row)
            text = f"the orchestrator was restarted while it was {migration.step.value}"
            self._records.note(migration, text)
            self._run(migration, self._recover_once_up(migration))

    # ---- one migration -------------------------------------------------------------------------

    def _run(self, migration: Migration, work: Coroutine[Any, Any, None]) -> None:
        migration.capsule.migration = migration.name
        if (snapshot := self._fleet.snapshots.get(migration.job.name)) is not None:
            why = f"{migration.name} of {migration.capsule.name} began"
            snapshot.abandon(why, to_a_move=True)
        self._fleet.migrations[migration.name] = migration
        self._tasks.spawn(self._follow(migration, work))

    async def _follow(self, migration: Migration, work: Coroutine[Any, Any, None]) -> None:
        await migration.until_over(work)
        self._fleet.forget_migrations(KEPT_MIGRATIONS)
        if isinstance(migration, HostMigration):
            migration.let_go()
            self._tasks.spawn(self._costing.end(migration))
        await self._on_end(migration)

    def _from_row(self, job: Job, capsule: Capsule, row: MigrationRow) -> Migration:
        """Make the migration that an earlier orchestrator has left under way."""
        if row.kind == GpuSwap.kind:
            order = Order(job, capsule, capsule.host, row.reason, row.by)
            return GpuSwap.from_row(self._context, order, row)
        if capsule.host not in (row.source, row.destination):  # it was just passed on
            row = msgspec.structs.replace(row, destination=capsule.host)
        if capsule.host == row.destination and row.state in UNCOMMITTED:
            # It was committed, but the orchestrator ended before it wrote that step.
            row = msgspec.structs.replace(row, state=MigrationStep.COMMITTED.value)
        order = Order(job, capsule, row.destination, row.reason, row.by)
        return HostMigration.from_row(self._context, order, row)

    async def _recover_once_up(self, migration: Migration) -> None:
        """Wait until both hosts are up, at most twice ``timeouts.suspicion``, then recover: a
        request to a host that has not reported yet would fail."""
        timeouts = self._fleet.cluster.timeouts
        until = time.monotonic() + 2 * timeouts.suspicion
        while not all(map(self._fleet.is_up, (migration.source, migration.destination))):
            if time.monotonic() > until:
                break
            await asyncio.sleep(timeouts.heartbeat / 10)
        await migration.recover()
