# SPDX-License-Identifier: Apache-2.0
"""A cluster whose tainted hosts are emptied, with a real fleet and journal and a stand-in for the
moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import (
    LiveshiftError,
    NoSpare,
    Refused,
)
from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Planned, Prediction, RunJob
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import evacuation
from liveshift.runtime.moves.evacuation import Evacuation


class Clock:
    """Stands in for ``time`` in the module under test: it goes on where a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(evacuation, "time", made)
    return made


class StandIn:
    """Plans moves as MigrationPlanner would, and begins them as MigrationService would, while a
    spare is ``free``; a test says when they end."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.cluster = fleet.cluster
        self.free = True
        self.kinds = ""  # of the reasons why no host is free
        self.asked: list[str] = []
        self.begun: list[str] = []
        self._number = 0
        self.untils: dict[str, float | None] = {}
        self.predicted: dict[str, Prediction] = {}
        self.unplanned: set[str] = set()
        self.plans_begun = 0
        self.hold_plans: asyncio.Event | None = None
        self.told: list[tuple[str, Any]] = []

    async def request(self, host: str, message: Any, timeout: float) -> None:
        self.told.append((host, message))

    async def plan(self, order: Order, *, watch: bool) -> Planned | LiveshiftError:
        capsule = order.capsule
        assert not watch, "for a host that must be empty soon no second is left for that"
        self.plans_begun += 1
        if self.hold_plans is not None:
            await self.hold_plans.wait()
        if capsule.name in self.unplanned:
            raise Refused(f"{capsule.name} holds a lock")
        return Planned(capsule.name, capsule.host, "h2", [], 0, 0, self.predicted[capsule.name])

    def start(self, order: Order) -> HostMigration:
        capsule = order.capsule
        assert not capsule.migration
        self.asked.append(capsule.name)
        if not self.free and self.kinds:
            why = f"h{len(self.asked)} has no free slot ({len(self.asked)} more as well)"
            raise NoSpare(f"no spare can take {capsule.name}: {why}", kinds=self.kinds)
        if not self.free:
            raise Refused(f"no spare can take {capsule.name}", hint="add a host")
        self.untils[capsule.name] = order.until
        self._number += 1
        # It does nothing here: it only stands in the fleet with a step.
        move = HostMigration(cast(Any, self), self._number, replace(order, destination="h2"))
        capsule.migration = move.name
        self.fleet.migrations[move.name] = move
        self.begun.append(f"{capsule.name}: {order.reason} ({order.by})")
        return move

    def end(self, move: str, step: MigrationStep, error: LiveshiftError | None = None) -> None:
        ended = self.fleet.migrations[move]
        ended.error = error
        ended.step = step
        ended.capsule.migration = None
        if step is MigrationStep.DONE:
            ended.capsule.host = ended.destination


class Scene:
    def __init__(self, state: Path) -> None:
        self.fleet = Fleet(config.parse(CLUSTER.format(state=state)).cluster)
        for name, hosts in (("a", ["h1", "h1"]), ("b", ["h0", "h1"])):
            run = RunJob(name, 2, ["true"], {}, "/", 0, [])
            capsules = {f"{name}/{i}": Capsule(f"{name}/{i}", i, h, 1) for i, h in enumerate(hosts)}
            self.fleet.jobs[name] = Job(name, Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
        self.moves = StandIn(self.fleet)
        self.evacuation = Evacuation(self.fleet, *(cast(Any, self.moves) for _ in range(2)))
        self.looks = 0
        start_next = self.evacuation._start_next

        def counted(host: str) -> None:
            start_next(host)
            self.looks += 1

        cast(Any, self.evacuation)._start_next = counted

    def capsule(self, name: str) -> Capsule:
        return self.fleet.jobs[name.partition("/")[0]].capsules[name]

    def taint(self, host: str) -> None:
        self.fleet.taints[host] = ("ECC errors", "root")
        self.evacuation.retry(host)

    async def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline, f"it did not happen; asked: {self.moves.asked}"
            await asyncio.sleep(0.005)

    async def look(self) -> None:
        """Wait until the evacuation has looked at a tainted host, as things are now."""
        looks = self.looks
        self.evacuation.wake()
        await self.until(lambda: self.looks > looks)

    async def begins_after(self, clock: Clock, seconds: float) -> None:
        """The next move begins in so many seconds, and not before."""
        begun = len(self.moves.begun)
        await self.look()
        clock.now += seconds - 1
        await self.look()
        assert len(self.moves.begun) == begun
        clock.now += 1
        await self.look()
        assert len(self.moves.begun) == begun + 1

    def untold(self) -> list[str]:
        return [e.text for e in self.fleet.journal.events("", 0) if e.kind == "not moved"]


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], Scene]:
    monkeypatch.setattr(evacuation, "TICK_S", 0.02)

    def run(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> Scene:
        async def scene() -> Scene:
            made = Scene(tmp_path)
            watching = asyncio.create_task(made.evacuation.run())
            try:
                await act(made)
            finally:
                watching.cancel()
            return made

        return asyncio.run(scene())

    return run


Play = Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], Scene]
