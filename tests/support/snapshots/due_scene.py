# SPDX-License-Identifier: Apache-2.0
"""A job whose snapshots are due again and again. Agents and gates are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet_scene import a_fleet
from orchestrator_parts import Parts
from snapshot_stage import SnapshotStage
from waits import until_async

from liveshift.runtime import messages
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import ProtectionRow
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.protection import protection as module
from liveshift.runtime.protection.job_snapshots import JobSnapshots
from liveshift.runtime.protection.protection import Protection
from liveshift.runtime.snapshot.directory_images import DirectoryImages

OFTEN = "[snapshots]\nevery = 1\n[timeouts]\nsuspicion = 1\nheartbeat = 0.01\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "FIRST_S", 0.0)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


class Scene:
    """The job a, with a/0 on h0 and a/1 on h1 (``hosts``), in a cluster whose third host is h2.
    Agents and gates are stand-ins."""

    def __init__(
        self, state: Path, more: str = OFTEN, hosts: tuple[str, str] = ("h0", "h1")
    ) -> None:
        self.state, self.more, self.hosts = state, more, hosts
        self.fleet = self._a_fleet()
        self.stage = Recorded(self.fleet)
        images = DirectoryImages(self.fleet.cluster, self._no_host)
        self.snapshots = JobSnapshots(self.fleet, self.stage, images)
        self.protection = Protection(self.fleet, self.stage, self.snapshots)

    async def _no_host(self, host: str, message: messages.Message, timeout: float) -> None:
        raise AssertionError("nothing is saved here")

    def _a_fleet(self) -> Fleet:
        fleet = a_fleet(self.state, self.more, self.hosts)
        for capsule in fleet.jobs["a"].capsules.values():
            capsule.started = True
        return fleet

    @property
    def job(self) -> Job:
        return self.fleet.jobs["a"]

    def row(self) -> ProtectionRow:
        (job,) = status(self.fleet, lambda job: job is self.job, sees_all=True).jobs
        found = job.protection
        assert found is not None
        return found

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.text) for event in self.fleet.journal.events("a", 0)]

    def run(self, *until: Callable[[], object], without: str = "") -> None:
        """Let it take snapshots until each of these has become true. All hosts but ``without``
        are up."""

        async def act() -> None:
            work = asyncio.create_task(self.protection.run())
            beats = asyncio.create_task(self._beat(without))
            for each in until:
                await until_async(each)
            work.cancel()
            beats.cancel()

        asyncio.run(act())

    async def _beat(self, without: str) -> None:
        while True:
            for name, host in self.fleet.hosts.items():
                host.heard = time.monotonic() - (1000.0 if name == without else 0.0)
            await asyncio.sleep(0.01)


class Recorded(SnapshotStage):
    """It also writes into the journal what is complete."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet

    def complete(self, generation: Generation) -> None:
        super().complete(generation)
        self.fleet.journal.snapshots.complete_snapshot(generation)
        job = self.fleet.jobs[generation.job]
        job.newest, job.taking = generation, 0


def a_move(scene: Scene) -> HostMigration:
    """A move of a/1 that is under way, of which nothing has been done yet."""
    order = Order(scene.job, scene.job.capsules["a/1"], "h2", "a test", "root")
    move = HostMigration(Parts(scene.fleet).context, 3, order)
    scene.fleet.migrations[move.name] = move
    return move


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)
