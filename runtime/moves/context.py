# SPDX-License-Identifier: Apache-2.0
"""What running migrations and snapshots need of the orchestrator: it implements MigrationContext
and SnapshotContext."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...errors import Refused, Unreachable
from ..fleet.address_book import AddressBook
from ..fleet.agents import Agents
from ..fleet.fleet import Fleet
from ..losses.watch import MISSED
from ..migration.migration import Migration
from ..migration.migration_records import MigrationRecords
from ..model.jobs import Capsule, Job
from ..model.ownership import may_pass
from ..model.snapshots import Generation
from ..quiesce.gates import Gates, hosts_of
from .planning import MigrationPlanner


class OrchestratorContext:
    """The orchestrator has one instance, which all migrations and snapshots use. MigrationContext
    and SnapshotContext say what each method does and raises."""

    def __init__(
        self,
        fleet: Fleet,
        agents: Agents,
        address_book: AddressBook,
        planner: MigrationPlanner,
        records: MigrationRecords,
        gates: Gates,
    ) -> None:
        self.cluster = fleet.cluster
        self._fleet = fleet
        self._records = records
        self._gates = gates
        # MigrationContext and SnapshotContext say what each of these does.
        self.request = agents.request
        self.is_up = fleet.is_up
        self.publish = address_book.publish
        self.another_spare = planner.another_spare
        self.predict = planner.predict
        self.note = records.note
        self.record = records.record

    # ---- ownership -----------------------------------------------------------------------------

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        if not may_pass(capsule.owner, still):
            raise Refused(f"{capsule.name} may run on {capsule.host}: it cannot pass to {host}")
        if capsule.code is not None:
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        epoch = capsule.epoch + 1
        self._fleet.journal.commit(capsule.name, host, epoch)
        capsule.host, capsule.epoch, capsule.granted = host, epoch, False

    def complete(self, generation: Generation) -> None:
        self._fleet.journal.snapshots.complete_snapshot(generation)
        job = self._fleet.jobs[generation.job]
        job.newest, job.taking = generation, 0

    def suspend(self, generation: Generation, why: str, to: str = "") -> None:
        job = self._fleet.jobs[generation.job]
        if moving := self._fleet.moves_of(job):
            raise Refused(f"{moving[0].name} is under way: {job.name} is not suspended in a move")
        row = self._fleet.journal.snapshots.suspend(generation, why, to)
        job.newest, job.taking = generation, 0
        job.enter(row.owners, row.rewinds, "suspended")
        self._gates.forget(job.name)

    # ---- the gates of the job ------------------------------------------------------------------

    async def until_heard(self, job: Job, by: float) -> None:
        if job.newest is None:  # it is not rewound
            return
        limits = self.cluster.timeouts
        by = min(by, time.monotonic() + limits.suspicion)
        while True:
            hosts = hosts_of(job)
            if silent := [host for host in hosts if not self.is_up(host)]:
                raise Unreachable(f"{', '.join(silent)} stopped answering")
            missed = time.monotonic() - MISSED * limits.heartbeat
            if all(self._fleet.hosts[host].heard >= missed for host in hosts):
                return
            if time.monotonic() >= by:  # of many busy hosts one or the other is always late
                return
            await asyncio.sleep(limits.heartbeat / 10)

    async def quiesce(self, migration: Migration) -> str:
        job = migration.job
        shared = bool(self._others_at_gates(migration))  # before the wait: one of them closes
        # Migration.holds_gates is set already: no snapshot begins to close them after this one.
        # A snapshot cannot release them while communicators are down and a host is silent.
        try:
            while (taken := self._fleet.snapshots.get(job.name)) and not taken.released.is_set():
                migration.waits = taken.name
                await taken.released.wait()
        finally:
            migration.waits = ""
        boundary = await self._gates.close(job, job.timeouts(self.cluster), shared=shared)
        self._records.note_boundary(migration, boundary.text)
        return boundary.text

    async def reopen(self, migration: Migration) -> str:
        if self._others_at_gates(migration):
            return "another move of the job holds them still"

        def note(text: str) -> None:
            migration.waits = text
            self.note(migration, text)

        try:
            return await self._open(migration.job, note)
        finally:
            migration.waits = ""

    def at_gates(self, job: Job) -> str:
        holds = (m.name for m in self._fleet.moves_of(job) if m.holds_gates)
        return next(holds, "")

    async def close_gates(self, job: Job) -> str:
        return (await self._gates.close(job, job.timeouts(self.cluster), shared=False)).text

    async def open_gates(self, job: Job) -> str:
        def note(text: str) -> None:
            self._fleet.journal.note(job.name, "snapshot", text)

        return await self._open(job, note)

    async def _open(self, job: Job, note: Callable[[str], None]) -> str:
        noted = ""
        while job.state != "ended":
            try:
                return await self._gates.open(job, job.timeouts(self.cluster))
            except Exception as error:  # try again: the job needs its communicators to go on
                if noted != str(error):
                    noted = str(error)
                    note(f"the gates of {job.name} are not open yet: {error}")
                if any(capsule.code is not None for capsule in job.capsules.values()):
                    break  # a rank has ended
                await asyncio.sleep(self.cluster.timeouts.heartbeat)
        self._gates.forget(job.name)
        return "the job has ended"

    def _others_at_gates(self, migration: Migration) -> list[Migration]:
        """List the other migrations of the same job that hold its ranks at a boundary."""
        moves = self._fleet.moves_of(migration.job)
        return [other for other in moves if other is not migration and other.holds_gates]
