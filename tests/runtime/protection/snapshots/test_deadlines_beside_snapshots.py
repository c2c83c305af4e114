# SPDX-License-Identifier: Apache-2.0
"""A host must be empty soon while a snapshot of a job on it is under way: the move goes first, and
keeps its time. The snapshot is given up, and taken again afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from saved_scene import DISK, SavedScene, a_secret

from liveshift.runtime import messages
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import evacuation
from liveshift.runtime.moves.evacuation import Evacuation

WITHIN_S = 30.0
BEFORE_ALL_ARE_DUMPED = ["Inspect h1", "Hold", "StartSnapshot h1", "LockCapsule h1", "DumpCapsule"]


class Scene(SavedScene):
    """h1 has a/1, which may go to h2 or h3; the other one of them holds the images then."""

    settings = f'{SavedScene.settings}[hosts.h3]\naddress = "10.88.0.13"\nslots = 4\n'

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
        super().__init__(state, monkeypatch, secret)
        self.alive.add("h3")
        self.kernels.add("h3")
        self.fleet.hosts["h3"].heard = time.monotonic()

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self.evacuation = Evacuation(fleet, self.parts.planner, self.parts.migrations)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().loops(), self.evacuation.run()]

    async def empty_soon(self) -> messages.Evacuating:
        """As `liveshift drain h1 --within` does."""
        self.fleet.taints["h1"] = ("spot notice", "root")
        self.fleet.deadlines["h1"] = time.monotonic() + WITHIN_S
        return await self.evacuation.plan("h1", WITHIN_S)

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        answer = await super().request(host, message, limit)
        match message:
            case messages.StartPrecopy() | messages.Resume():
                return messages.Moved(10, [])
            case messages.Freeze():
                return messages.Frozen(1000, [])
            case messages.Settle():
                return messages.Settled("ended")
            case messages.Progress():
                return messages.Arrived(1000, 1000, True)
        return answer

    def moved(self) -> bool:
        return self.job.capsules["a/1"].host != "h1" and not self.fleet.moves_of(self.job)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(evacuation, "TICK_S", 0.02)
    return Scene(tmp_path / "state", monkeypatch, a_secret(tmp_path / "keys"))


def until_told(scene: Scene) -> float:
    """Seconds that the source of the move was given for the pre-copy and the rest."""
    (told,) = [ask for _, ask in scene.asks if isinstance(ask, messages.StartPrecopy)]
    return told.within


async def drained_in(scene: Scene, step: str) -> None:
    """h1 must be empty soon, once the snapshot has come to a step, which no host answers before the
    move is over."""
    held = scene.held[step] = asyncio.Event()
    name = step.split()[0]
    await scene.until(lambda: bool(scene.asked(name)) and "a" in scene.fleet.snapshots)
    number = scene.fleet.snapshots["a"].number
    await asyncio.sleep(0.05)
    scene.held.pop(step)  # what is asked from now on is answered
    found = await scene.empty_soon()
    assert [each.late for each in found.capsules] == [False]
    await scene.until(scene.moved)
    assert not held.is_set(), "the move has not waited for the snapshot"
    (move,) = scene.fleet.migrations.values()
    assert move.step is MigrationStep.DONE
    assert 0 < until_told(scene) <= WITHIN_S
    held.set()
    await asyncio.sleep(0.05)
    assert scene.job.newest is None or scene.job.newest.number != number, "it was given up"


@pytest.mark.parametrize("step", BEFORE_ALL_ARE_DUMPED)
def test_a_snapshot_that_is_under_way_gives_way_and_is_taken_again(scene: Scene, step: str) -> None:
    async def play() -> None:
        scene.ask(snapshot_every=0.001)
        async with scene.at_work():
            await drained_in(scene, step)
            await scene.until(lambda: owner() == scene.job.capsules["a/1"].host)

    def owner() -> str:
        return scene.job.newest.owners["a/1"][0] if scene.job.newest is not None else ""

    asyncio.run(play())
    assert owner() != "h1"


@pytest.mark.parametrize("step", BEFORE_ALL_ARE_DUMPED)
def test_one_that_is_to_be_saved_is_taken_again_after_the_move(scene: Scene, step: str) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.ordered.save("root", scene.job, DISK, dry_run=False)
            await drained_in(scene, step)
            await scene.until(lambda: bool(scene.history("saved")))

    asyncio.run(play())
    assert scene.history("saving")[1:] == [
        "given up: m1 of a/1 began; it is tried again after the end of m1"
    ]
    assert scene.kinds() == ["saving", "saved"]
    assert scene.on_disk().snapshot == "s3"


def test_one_that_has_dumped_all_does_not_hold_the_move_up_either(scene: Scene) -> None:
    """The job trains on by then. But the image of a capsule that has moved since is of no use."""

    async def play() -> None:
        async with scene.at_work():
            scene.ordered.save("root", scene.job, DISK, dry_run=False)
            closes = scene.held["CloseSnapshot"] = asyncio.Event()
            await scene.until(lambda: bool(scene.asked("CloseSnapshot")))
            await scene.empty_soon()
            await scene.until(scene.moved)
            assert 0 < until_told(scene) <= WITHIN_S
            scene.held.clear()
            closes.set()
            await scene.until(lambda: bool(scene.history("saved")))

    asyncio.run(play())
    assert scene.history("saving")[1:] == [
        "a capsule of a has moved or ended since s2; it is tried again after the end of the move"
    ]
    assert scene.on_disk().snapshot == "s3"
