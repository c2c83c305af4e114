# SPDX-License-Identifier: Apache-2.0
"""What a running migration needs of the orchestrator: it implements MigrationContext."""

from __future__ import annotations

import asyncio

from ...errors import Refused
from ..migration.migration import Migration
from ..model.jobs import Capsule
from ..model.ownership import may_pass
from ..quiesce.gates import Gates
from .address_book import AddressBook
from .agents import Agents
from .fleet import Fleet
from .migration_records import MigrationRecords
from .planning import MigrationPlanner


class OrchestratorContext:
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
        # MigrationContext says what each of these does.
        self.request = agents.request
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

    # ---- the gates of the job ------------------------------------------------------------------

    async def quiesce(self, migration: Migration) -> str:
        job = migration.job
        shared = bool(self._others_at_gates(migration))
        boundary = await self._gates.close(job, job.timeouts(self.cluster), shared=shared)
        self._records.note_boundary(migration, boundary.text)
        return boundary.text

    async def reopen(self, migration: Migration) -> str:
        if self._others_at_gates(migration):
            return "another move of the job holds them still"
        job, noted = migration.job, ""
        while job.state != "ended":
            try:
                return await self._gates.open(job, job.timeouts(self.cluster))
            except Exception as error:  # try again: the job needs its communicators to go on
                if noted != str(error):
                    noted = str(error)
                    self.note(migration, f"the gates of {job.name} are not open yet: {error}")
                if any(capsule.code is not None for capsule in job.capsules.values()):
                    break  # a rank has ended
                await asyncio.sleep(self.cluster.timeouts.heartbeat)
        self._gates.forget(job.name)
        return "the job has ended"

    def _others_at_gates(self, migration: Migration) -> list[Migration]:
        """List the other migrations of the same job that hold its ranks at a boundary."""
        others = [other for other in self._fleet.under_way() if other is not migration]
        return [other for other in others if other.job is migration.job and other.holds_gates]
