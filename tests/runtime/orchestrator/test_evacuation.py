# SPDX-License-Identifier: Apache-2.0
"""What a taint sets in motion, with a real fleet and journal and a stand-in for the moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fleet_scene import CLUSTER
from full_journal import fill
from predictions import predicted

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import (
    LiveshiftError,
    NoSpare,
    Refused,
    SourceFailed,
    SourceRefused,
    StepFailed,
)
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Planned, Prediction, RunJob
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.orchestrator import evacuation
from liveshift.runtime.orchestrator.evacuation import Evacuation, _Attempts
from liveshift.runtime.orchestrator.fleet import Fleet


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


def test_everything_on_a_tainted_host_moves_one_by_one(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        assert not scene.moves.asked  # nothing is tainted
        scene.taint("h1")
        for number, name in enumerate(("a/0", "a/1", "b/1"), start=1):
            await scene.until(lambda: len(scene.moves.begun) == number)  # noqa: B023 - called in this turn only
            await asyncio.sleep(0.1)
            assert len(scene.moves.begun) == number  # one at a time
            assert scene.moves.begun[-1] == f"{name}: h1 is tainted: ECC errors (root)"
            scene.moves.end(f"m{number}", MigrationStep.DONE)
            scene.evacuation.wake()
        await asyncio.sleep(0.1)

    assert len(play(act).moves.asked) == 3


def test_two_tainted_hosts_are_emptied_side_by_side(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        scene.taint("h0")
        await scene.until(lambda: len(scene.moves.begun) == 2)

    assert {entry.split(":")[0] for entry in play(act).moves.begun} == {"a/0", "b/0"}


def test_what_has_ended_or_is_moving_is_left_alone(play: Play) -> None:
    async def act(scene: Scene) -> None:
        capsules = scene.fleet.jobs["a"].capsules
        capsules["a/0"].code = 0
        capsules["a/1"].migration = "m99"
        scene.taint("h1")
        await scene.until(lambda: scene.moves.begun)

    assert play(act).moves.asked == ["b/1"]


def test_without_a_spare_it_is_said_once_and_tried_when_there_is_one(play: Play) -> None:
    """And at once, not when a while is over: a host has come, or a slot has been freed."""

    async def act(scene: Scene) -> None:
        scene.moves.free = False
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.asked) >= 3)
        for _ in range(3):
            scene.evacuation.wake()
            await asyncio.sleep(0.05)
        assert scene.untold() == [
            f"no spare can take {n} (add a host)" for n in ("a/0", "a/1", "b/1")
        ]
        scene.moves.free = True
        scene.evacuation.wake()
        await scene.until(lambda: scene.moves.begun)

    play(act)


def test_that_no_spare_is_free_is_said_again_only_for_another_kind_of_reason(play: Play) -> None:
    """Which hosts have it, and how many, changes with each host that comes or goes."""

    async def act(scene: Scene) -> None:
        scene.capsule("a/1").code = scene.capsule("b/1").code = 0
        scene.moves.free, scene.moves.kinds = False, "has no free slot"
        scene.taint("h1")
        for kinds in ("", "is not up", "has no free slot"):
            scene.moves.kinds = kinds or scene.moves.kinds
            for _ in range(3):
                scene.evacuation._attempts.setdefault("a/0", _Attempts()).not_before = 0.0
                await scene.look()
        assert len(scene.moves.asked) >= 9
        assert len(scene.untold()) == 2, scene.untold()

    play(act)


def test_without_a_spare_it_is_tried_again_when_a_host_has_room_and_not_at_each_look(
    play: Play, clock: Clock
) -> None:
    """In a full cluster of a thousand hosts the orchestrator would do nothing else."""

    async def act(scene: Scene) -> None:
        scene.moves.free, scene.moves.kinds = False, "has no free slot"
        for host in scene.fleet.hosts.values():
            host.heard = time.monotonic() + 1000
        scene.capsule("b/0").host = "h2"
        scene.taint("h1")
        await scene.look()
        for _ in range(3):
            await scene.look()
        assert scene.moves.asked == ["a/0", "a/1", "b/1"]
        clock.now += evacuation.RETRY_S  # in any case
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 6
        scene.capsule("b/0").code = 0  # h2 has a slot more
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 9
        scene.fleet.hosts["h2"].heard = 0.0  # it is down: that helps nobody
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 9
        scene.fleet.hosts["h2"].heard = time.monotonic() + 1000
        scene.moves.free = True
        await scene.look()
        assert scene.moves.begun[0].startswith("a/0")

    play(act)


def test_a_move_that_failed_is_tried_again_after_a_while_and_others_meanwhile(
    play: Play, clock: Clock
) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.FAILED)
        scene.evacuation.wake()
        await scene.until(lambda: len(scene.moves.begun) == 2)
        assert scene.moves.begun[1].startswith("a/1")
        scene.moves.end("m2", MigrationStep.DONE)
        await scene.until(lambda: len(scene.moves.begun) == 3)
        scene.moves.end("m3", MigrationStep.DONE)
        await scene.begins_after(clock, evacuation.RETRY_S)
        assert scene.moves.begun[3].startswith("a/0")

    play(act)


def test_what_fails_for_a_cause_in_the_capsule_is_not_tried_on_the_next_spare(
    play: Play, clock: Clock
) -> None:
    """After its dump or restore failed twice with the same words: only when a person asks, or much
    later. What the survey has found is looked for again, less and less often."""

    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        await scene.look()
        failed = SourceFailed("dump", "CRIU could not dump a/0: so")
        scene.moves.end("m1", MigrationStep.FAILED, failed)
        await scene.begins_after(clock, evacuation.RETRY_S)
        scene.moves.end("m2", MigrationStep.FAILED, failed)
        await scene.look()
        assert [each.split(":")[0] for each in scene.moves.begun] == ["a/0", "a/0"]
        scene.capsule("a/1").code = None
        await scene.look()
        refused = SourceRefused("process 7 holds it", hint="close it")
        for number, doubled in enumerate((2, 4, 8), 3):
            scene.moves.end(f"m{number}", MigrationStep.FAILED, refused)
            await scene.begins_after(clock, evacuation.RETRY_S * doubled)
        assert [each.split(":")[0] for each in scene.moves.begun[2:]] == ["a/1"] * 4
        scene.moves.end("m6", MigrationStep.DONE)
        await scene.look()
        assert len(scene.moves.begun) == 6, "a/0 still waits"
        scene.taint("h1")  # a person asks
        await scene.look()
        assert scene.moves.begun[-1].startswith("a/0")
        told = scene.untold()
        assert len(told) == 3, told
        assert "no other host is tried for 30 s, as the cause is in it: dump: CRIU" in told[0]
        assert "no other host is tried for 600 s, as the cause is in it: dump: CRIU" in told[1]
        assert "(`liveshift migrate a/0` tries again now)" in told[1]
        assert "for 60 s, as the cause is in it: process 7 holds it" in told[2]

    play(act)


def test_a_failure_with_other_words_is_tried_again_soon(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the same words twice in a row say that the third attempt would be in vain."""
    monkeypatch.setattr(evacuation, "RETRY_S", 0.05)

    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        errors = (
            SourceFailed("dump", "one"),
            SourceFailed("dump", "two"),
            StepFailed("ship", "gone"),
            SourceFailed("dump", "two"),
        )
        for number, error in enumerate(errors, 1):
            await scene.until(lambda: len(scene.moves.begun) == number)  # noqa: B023 - called in this turn only
            scene.moves.end(f"m{number}", MigrationStep.FAILED, error)
        await scene.until(lambda: len(scene.moves.begun) == 5)
        scene.moves.end("m5", MigrationStep.FAILED, errors[-1])
        await asyncio.sleep(0.4)
        assert len(scene.moves.begun) == 5

    play(act)


def test_a_full_disk_ends_no_evacuation(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        fill(scene.fleet.journal)
        scene.moves.end("m1", MigrationStep.FAILED, SourceFailed("dump", "x" * 10_000))
        scene.evacuation.wake()
        await scene.until(lambda: len(scene.moves.begun) == 2)
        assert scene.untold() == [], "the line could not be written"

    play(act)


def test_what_has_left_or_ended_is_forgotten(play: Play) -> None:
    """Each migration holds the survey of its capsule, and the daemon runs for months."""

    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.DONE)
        await scene.until(lambda: len(scene.moves.begun) == 2)
        scene.moves.end("m2", MigrationStep.FAILED, SourceFailed("dump", "a lock"))
        await scene.look()
        await scene.look()
        assert "a/0" not in scene.evacuation._attempts
        assert scene.evacuation._attempts["a/1"].failed == "dump: a lock"
        del scene.fleet.taints["h1"]
        scene.fleet.jobs["a"].capsules["a/1"].code = 0
        del scene.fleet.jobs["b"]
        scene.evacuation.wake()
        await scene.until(lambda: not scene.evacuation._attempts)

    play(act)


def test_a_renewed_taint_tries_at_once(play: Play) -> None:
    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.FAILED)
        scene.evacuation.wake()
        await asyncio.sleep(0.1)
        assert len(scene.moves.begun) == 1
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 2)

    play(act)


def test_untainting_stops_it(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        del scene.fleet.taints["h1"]
        scene.moves.end("m1", MigrationStep.DONE)
        scene.evacuation.wake()
        await asyncio.sleep(0.1)

    assert len(play(act).moves.asked) == 1


def soon(scene: Scene, within: float, **sizes: float) -> Coroutine[Any, Any, Any]:
    """Taint h1, which must be empty within so many seconds; sizes in GB."""
    scene.moves.predicted = {f"{name[0]}/{name[1]}": predicted(gb) for name, gb in sizes.items()}
    scene.fleet.taints["h1"] = ("spot notice", "root")
    scene.fleet.deadlines["h1"] = time.time() + within
    scene.evacuation.retry("h1")
    return scene.evacuation.plan("h1", within)


def test_a_host_with_time_is_emptied_one_by_one_the_quickest_first(play: Play) -> None:
    async def act(scene: Scene) -> None:
        found = await soon(scene, 60.0, a0=4.0, a1=1.0, b1=2.0)
        assert [each.capsule for each in found.capsules] == ["a/1", "b/1", "a/0"]
        assert not found.together
        assert not any(each.late for each in found.capsules)
        for number in (1, 2, 3):
            await scene.until(lambda: len(scene.moves.begun) == number)  # noqa: B023 - called in this turn only
            await asyncio.sleep(0.05)
            assert len(scene.moves.begun) == number, "one at a time"
            scene.moves.end(f"m{number}", MigrationStep.DONE)
        untils = [scene.moves.untils[name] or 0.0 for name in ("a/1", "b/1", "a/0")]
        assert untils == sorted(untils)
        assert untils[-1] - time.monotonic() < 60

    assert play(act).moves.asked == ["a/1", "b/1", "a/0"]


def test_the_same_is_foretold_and_nothing_moves(play: Play) -> None:
    async def act(scene: Scene) -> None:
        sizes = {"a/0": 16.0, "a/1": 1.0, "b/1": 1.0}
        scene.moves.predicted = {name: predicted(gb) for name, gb in sizes.items()}
        found = await scene.evacuation.forecast("h1", 6.0)
        assert [(each.capsule, each.late) for each in found.capsules][-1] == ("a/0", True)
        scene.evacuation.wake()
        await asyncio.sleep(0.1)

    scene = play(act)
    assert (scene.moves.asked, scene.fleet.journal.events("", 0)) == ([], [])


def test_where_that_takes_too_long_all_leave_at_once(play: Play) -> None:
    async def act(scene: Scene) -> None:
        found = await soon(scene, 10.0, a0=1.0, a1=1.0, b1=1.0)
        assert found.together
        assert found.empty_s <= 10.0 / 2
        await scene.until(lambda: len(scene.moves.begun) == 3)

    assert sorted(play(act).moves.asked) == ["a/0", "a/1", "b/1"]


def test_what_will_not_make_it_or_cannot_leave_is_named_and_the_others_go(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.moves.unplanned.add("b/1")
        found = await soon(scene, 6.0, a0=16.0, a1=1.0)
        late = {each.capsule: each for each in found.capsules if each.late}
        assert late.keys() == {"a/0", "b/1"}
        assert late["a/0"].empty_s > 16
        assert late["a/0"].at_most_s > 2 * late["a/0"].empty_s
        assert late["b/1"].error == "b/1 holds a lock"
        await scene.until(lambda: scene.moves.begun)

    scene = play(act)
    assert scene.moves.asked[0] == "a/1"
    told = [e for e in scene.fleet.journal.events("", 0) if e.kind == "late"]
    assert [e.subject for e in told] == ["a/0"]
    assert "may not be gone in time: it needs up to" in told[0].text


def test_nothing_begins_before_the_last_of_two_plans_is_made(play: Play) -> None:
    async def tainted(scene: Scene, within: float) -> Any:
        return await soon(scene, within, a0=1.0, a1=1.0, b1=1.0)

    async def act(scene: Scene) -> None:
        first_may_end = scene.moves.hold_plans = asyncio.Event()
        first = asyncio.create_task(tainted(scene, 60.0))
        await scene.until(lambda: scene.moves.plans_begun == 3)
        second_may_end = scene.moves.hold_plans = asyncio.Event()
        second = asyncio.create_task(tainted(scene, 10.0))
        await scene.until(lambda: scene.moves.plans_begun == 6)
        first_may_end.set()
        assert not (await first).together
        await scene.look()
        assert not scene.moves.begun
        second_may_end.set()
        assert (await second).together
        await scene.until(lambda: len(scene.moves.begun) == 3)

    assert sorted(play(act).moves.asked) == ["a/0", "a/1", "b/1"]


@pytest.mark.parametrize("step", [MigrationStep.PRECOPYING, MigrationStep.QUIESCING])
def test_a_move_that_began_without_the_deadline_gets_it(play: Play, step: MigrationStep) -> None:
    """Its source is told as long as memory goes ahead; what comes later is as fast as it can be."""

    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: scene.moves.begun)
        move = cast(HostMigration, scene.fleet.migrations["m1"])
        move.step, move.predicted = step, predicted(1.0)
        await soon(scene, 20.0, a1=1.0, b1=1.0)
        assert move.until is not None
        assert 0 < move.until - time.monotonic() <= 20
        if step is not MigrationStep.PRECOPYING:
            assert scene.moves.told == []
            return
        ((host, word),) = scene.moves.told
        assert (host, word.capsule) == ("h1", "a/0")
        assert 0 < word.sooner < 20 - predicted(1.0).seconds

    play(act)


def test_a_deadline_outlasts_the_orchestrator_and_ends_with_the_taint(tmp_path: Path) -> None:
    first = Scene(tmp_path).fleet
    first.journal.set_taint("h1", "spot", "root")
    first.journal.set_deadline("h1", 1234.5)
    first.journal.file.close()
    second = Fleet(first.cluster)
    assert second.deadlines == {"h1": 1234.5}
    second.journal.clear_taint("h1")
    assert second.journal.deadlines() == {}
