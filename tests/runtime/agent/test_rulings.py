# SPDX-License-Identifier: Apache-2.0
"""What an agent does with each ruling on each copy that it holds."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rulings_scene import SETTLE, Migration, Scene

from liveshift.errors import LiveshiftError, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent.host import ran_here
from liveshift.runtime.model.ownership import Ruling


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    (tmp_path / "images").mkdir()
    return Scene(tmp_path / "images")


# ---- the source's copy -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ruling", "promised", "alive", "state", "done"),
    [
        (Ruling.WAIT, True, True, "held", []),
        (Ruling.WAIT, False, True, "held", []),
        (Ruling.WAIT, True, False, "nothing", []),
        (Ruling.RUN, True, True, "runs", ["thaw", "noted"]),
        (Ruling.RUN, False, True, "runs", ["thaw", "noted"]),
        (Ruling.RUN, True, False, "ended", ["thaw", "ended"]),
        (Ruling.END, True, True, "ended", ["finish"]),
        (Ruling.END, True, False, "ended", ["finish"]),
        (Ruling.END, False, True, "ended", ["thaw"]),
        (Ruling.END, False, False, "ended", ["thaw"]),
    ],
)
def test_each_ruling_on_the_sources_copy(
    scene: Scene, ruling: Ruling, promised: bool, alive: bool, state: str, done: list[str]
) -> None:
    scene.leaves(promised=promised)
    scene.alive = alive
    assert scene.rule(ruling, 7) == state
    assert scene.done == done
    assert ("m1" in scene.outgoing) is (ruling is Ruling.WAIT)
    assert scene.resident.epoch == (7 if ruling is Ruling.RUN else 5)
    assert ran_here.last_epoch(scene.factory, "gpt/1") == (7 if ruling is Ruling.RUN else 0)
    assert ("gpt/1" in scene.capsules) is (done != ["finish"]), "one that has moved is not here"
    (claim,) = scene.claims
    assert (claim.side, claim.epoch, claim.ready, claim.rewinds) == ("leaving", 5, True, 1)


@pytest.mark.parametrize(
    ("ruling", "promised", "fails"),
    [(Ruling.RUN, True, "thaw"), (Ruling.END, True, "finish"), (Ruling.END, False, "thaw")],
)
def test_what_fails_is_tried_again_with_the_next_claim(
    scene: Scene, ruling: Ruling, promised: bool, fails: str
) -> None:
    scene.leaves(promised=promised)
    scene.fails = fails
    with pytest.raises(StepFailed):
        scene.rule(ruling)
    assert "m1" in scene.outgoing
    scene.fails, scene.done = "", []
    scene.rule(ruling)
    assert scene.done[0] == fails
    assert "m1" not in scene.outgoing


@pytest.mark.parametrize("ruling", [Ruling.RUN, Ruling.END])
def test_a_ruling_of_an_earlier_epoch_is_none(scene: Scene, ruling: Ruling) -> None:
    scene.leaves()
    with pytest.raises(LiveshiftError, match="is of epoch 4, and it has 5"):
        scene.rule(ruling, 4)
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])


def test_a_capsule_whose_epoch_cannot_be_noted_runs_nevertheless(scene: Scene) -> None:
    scene.leaves()
    scene.fails = "noted"
    assert scene.rule(Ruling.RUN) == "runs"
    assert scene.outgoing == {}


def test_gpus_that_a_capsule_has_left_are_looked_at(scene: Scene) -> None:
    scene.leaves().gpus = ["GPU-1"]
    scene.rule(Ruling.END)
    assert scene.done == ["finish", "GPUs looked at"]


# ---- the destination's copy --------------------------------------------------------------------


@pytest.mark.parametrize("ruling", Ruling)
def test_each_ruling_on_the_destinations_copy(scene: Scene, ruling: Ruling) -> None:
    """It is not ready to run, so RUN is only said: the restore is on its way."""
    scene.comes()
    over = ruling is Ruling.END
    assert scene.rule(ruling) == ("ended" if over else "held")
    assert scene.done == (["forget", "discard"] if over else [])
    assert ("m1" in scene.incoming) is not over
    (claim,) = scene.claims
    assert (claim.side, claim.ready, claim.rewinds) == ("coming", False, 1)


def test_a_removal_that_fails_is_tried_again(scene: Scene) -> None:
    scene.comes()
    scene.fails = "discard"
    with pytest.raises(StepFailed):
        scene.rule(Ruling.END)
    assert "m1" in scene.incoming
    scene.fails = ""
    assert scene.rule(Ruling.END) == "ended"
    assert scene.incoming == {}


# ---- when it claims ----------------------------------------------------------------------------


def test_nothing_changes_while_the_orchestrator_is_silent(scene: Scene) -> None:
    scene.leaves()
    scene.ruled = Unreachable("the orchestrator is silent")
    with pytest.raises(Unreachable):
        asyncio.run(scene.rulings.claim("m1"))
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])
    assert not scene.is_busy("m1")


def test_no_claim_is_sent_for_a_copy_with_work_under_way(scene: Scene) -> None:
    scene.leaves()
    with scene.working("m1"):
        assert scene.rule(Ruling.END) == "held"
    assert scene.claims == []


@pytest.mark.parametrize(
    ("code", "alive", "state"),
    [(None, True, "runs"), (None, False, "ended"), (0, True, "ended")],
)
def test_a_capsule_that_no_migration_holds(
    scene: Scene, code: int | None, alive: bool, state: str
) -> None:
    scene.resident.code, scene.alive = code, alive
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == state
    scene.capsules.clear()
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == "nothing"
    assert scene.claims == []


def test_a_copy_that_was_killed_while_it_is_held_is_nothing(scene: Scene) -> None:
    scene.leaves()
    scene.alive = False
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == "nothing"
    assert scene.done == ["abandon"]


def test_an_order_interrupts_the_work_under_way_and_waits_for_its_end(scene: Scene) -> None:
    scene.leaves()
    scene.ruled = messages.Ruled("run", 5)

    async def both() -> str:
        with scene.working("m1"):
            order = asyncio.create_task(scene.rulings.claim_now(SETTLE))
            await asyncio.sleep(0.05)
            assert (scene.done, scene.claims, order.done()) == (["abandon"], [], False)
        return (await order).state

    assert asyncio.run(both()) == "runs"


def test_it_claims_with_every_heartbeat_whatever_happens(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.leaves()
    scene.ruled = Unreachable("the orchestrator is silent")

    async def claim() -> None:
        work = asyncio.create_task(scene.rulings.keep_claiming())
        while len(scene.claims) < 2:
            await asyncio.sleep(0.005)
        scene.ruled, scene.fails = messages.Ruled("end", 5), "finish"
        while "finish" not in scene.done:
            await asyncio.sleep(0.005)

        def breaks() -> None:
            scene.done.append("broke")
            raise ZeroDivisionError

        scene.outgoing["m1"].finish = breaks  # type: ignore[method-assign]
        while "broke" not in scene.done:
            await asyncio.sleep(0.005)
        scene.outgoing["m1"].finish = scene.note("finish")  # type: ignore[method-assign]
        scene.fails = ""
        while scene.outgoing:
            await asyncio.sleep(0.005)
        work.cancel()

    asyncio.run(asyncio.wait_for(claim(), 20))


def test_a_migration_whose_disk_hangs_keeps_no_other_one_waiting(scene: Scene) -> None:
    """Neither for its ruling nor for the network of this host."""
    back, stuck = threading.Event(), scene.comes()
    stuck.inbox = SimpleNamespace(close=lambda: back.wait(20))
    scene.ruled = messages.Ruled("end", 5)

    async def story() -> None:
        work = asyncio.create_task(scene.rulings.keep_claiming())
        while not scene.is_busy("m1"):
            await asyncio.sleep(0.005)
        other = Migration(scene)
        other.migration = "m2"
        scene.incoming["m2"] = cast(Any, other)
        async with asyncio.timeout(5):
            while "m2" in scene.incoming:
                await asyncio.sleep(0.005)
        assert list(scene.incoming) == ["m1"]
        back.set()
        async with asyncio.timeout(5):
            while scene.incoming:
                await asyncio.sleep(0.005)
        work.cancel()

    try:
        asyncio.run(story())
    finally:
        back.set()
    assert [claim.migration for claim in scene.claims] == ["m1", "m2"]
