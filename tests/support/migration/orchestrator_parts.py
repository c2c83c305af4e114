# SPDX-License-Identifier: Apache-2.0
"""The parts of the orchestrator that migrations need, wired as the orchestrator wires them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_scene import CLUSTER
from journal_rows import OWNERS

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.address_book import AddressBook
from liveshift.runtime.fleet.agents import Agents
from liveshift.runtime.fleet.claims import ClaimJudge
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import RunJob
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.migration.migration_records import MigrationRecords
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.moves.context import OrchestratorContext
from liveshift.runtime.moves.costing import Costing
from liveshift.runtime.moves.migration_service import MigrationService
from liveshift.runtime.moves.planning import MigrationPlanner
from liveshift.runtime.quiesce.gates import Gates


async def ignored(_migration: Migration) -> None:
    return None


class Parts:
    """All of them; ``gates`` may be a double."""

    def __init__(
        self,
        fleet: Fleet,
        switchboard: Any = None,
        on_end: Callable[[Migration], Awaitable[None]] = ignored,
        gates: Any = None,
    ) -> None:
        self.fleet = fleet
        self.agents = Agents(fleet, switchboard)
        self.records = MigrationRecords(fleet.journal)
        self.address_book = AddressBook(fleet, switchboard)
        self.claims = ClaimJudge(fleet, self.records)
        self.planner = MigrationPlanner(fleet, self.agents)
        self.costing = Costing(fleet, self.agents, self.records.record_cost)
        self.context = OrchestratorContext(
            fleet,
            self.agents,
            self.address_book,
            self.planner,
            self.records,
            gates or Gates(self.agents.request),
        )
        self.migrations = MigrationService(
            fleet, self.context, self.planner, self.records, self.costing, on_end
        )


def with_a_job(state: Path, switchboard: Any = None) -> Parts:
    """With the job gpt, gpt/0 on h0 and gpt/1 on h1; all hosts are up."""
    fleet = Fleet(config.parse(CLUSTER.replace("{state}", str(state))).cluster)
    fleet.journal.add_job("gpt", 1, "10.99.0.0/24", b"", OWNERS)
    capsules = {c: Capsule(c, n, host, 1, started=True) for c, (n, host) in OWNERS.items()}
    run = RunJob("gpt", 2, ["true"], {}, "/", 0, [])
    fleet.jobs["gpt"] = Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
    for host in fleet.hosts.values():
        host.heard = time.monotonic()
    return Parts(fleet, switchboard)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return with_a_job(tmp_path)
