# SPDX-License-Identifier: Apache-2.0
"""How a host is emptied that must be empty soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from evacuation_scene import Play, Scene, play
from predictions import predicted

from liveshift.runtime.cost.evacuation_plan import BEYOND_S
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["play"]


def soon(scene: Scene, within: float, **sizes: float) -> Coroutine[Any, Any, Any]:
    """Taint h1, which must be empty within so many seconds; sizes in GB."""
    scene.moves.predicted = {f"{name[0]}/{name[1]}": predicted(gb) for name, gb in sizes.items()}
    scene.fleet.taints["h1"] = ("spot notice", "root")
    scene.fleet.deadlines["h1"] = time.monotonic() + within
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


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_moves_no_deadline(
    play: Play, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    async def act(scene: Scene) -> None:
        planned, now = soon(scene, 60.0, a0=4.0, a1=1.0, b1=2.0), time.time()
        monkeypatch.setattr(time, "time", lambda: now + step)
        await planned
        await scene.until(lambda: scene.moves.begun)
        (until,) = scene.moves.untils.values()
        assert until is not None
        assert 0 < until - time.monotonic() < 60

    play(act)


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


def test_a_host_without_a_deadline_is_foretold_one_by_one_at_the_least_cost(play: Play) -> None:
    async def act(scene: Scene) -> None:
        known = {"a/0": predicted(4.0), "a/1": predicted(1.0), "b/1": predicted(2.0)}
        scene.moves.predicted = dict(known)
        found = await scene.evacuation.forecast("h1", 0.0)
        assert (found.within, found.together) == (0.0, False)
        assert [(each.capsule, each.late) for each in found.capsules] == [
            ("a/1", False),
            ("b/1", False),
            ("a/0", False),
        ]
        alone = sum(each.empty_s for each in known.values())
        assert found.empty_s == pytest.approx(alone + 2 * BEYOND_S)
        # The cluster file may force a way: then the prediction is of that one.
        forced = msgspec.structs.replace(known["a/1"], empty_s=50.0)
        scene.moves.predicted["a/1"] = forced
        found = await scene.evacuation.forecast("h1", 0.0)
        assert found.empty_s == pytest.approx(alone - known["a/1"].empty_s + 50.0 + 2 * BEYOND_S)
        scene.fleet.jobs["a"].capsules["a/1"].migration = "m9"
        found = await scene.evacuation.forecast("h1", 0.0)
        (moving,) = (each for each in found.capsules if each.error)
        assert (moving.capsule, moving.error) == ("a/1", "it is being moved already")

    play(act)


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
    first.journal.set_deadline("h1", time.time() + 60)
    first.journal.file.close()
    second = Fleet(first.cluster)
    assert second.deadlines.keys() == {"h1"}
    assert 50 < second.deadlines["h1"] - time.monotonic() <= 60
    second.journal.clear_taint("h1")
    assert second.journal.deadlines() == {}
