# SPDX-License-Identifier: Apache-2.0
"""A job that is not taken back any more ends, with all that was lost of it."""

from __future__ import annotations

import asyncio

import pytest
from rewinds_scene import RewindsScene, scene

from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.model.jobs import KILLED

__all__ = ["scene"]


def test_a_job_that_is_stopped_meanwhile_ends(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert not scene.history("rewound")


def test_a_capsule_that_waited_for_a_rewind_ends_when_its_job_is_stopped(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewinding")))
            assert scene.job.capsules["a/1"].code is None
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.capsules["a/1"].code == KILLED)
            assert scene.job.capsules["a/0"].code is None, "its host ends it"
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)

    asyncio.run(play())
    assert scene.job.state == "ended"
    assert scene.history("lost") == ["a/1 is lost: h1 came back without a/1"]
    assert not scene.history("rewound")


def test_a_capsule_that_waited_for_a_rewind_ends_when_another_has_ended_well(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewinding")))
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.job.code == KILLED


def test_a_capsule_that_is_lost_again_ends_when_its_job_is_stopped(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED))
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            scene.rewinds.lacks(scene.job.capsules["a/0"], "h0 does not have it")
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert scene.job.rewinds == 1


def test_a_full_disk_ends_no_loop_and_the_end_is_recorded_once_there_is_room(
    scene: RewindsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def full(name: str, _code: int) -> None:
        tried.append(name)
        raise JournalError("the disk is full", hint="make room")

    async def play() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            with monkeypatch.context() as disk:
                disk.setattr(scene.fleet.journal, "set_ended", full)
                await scene.stopping.signal(scene.job, 15, "root")
                await scene.until(lambda: len(tried) > 3)
                assert scene.job.state == "ending"
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.history("rewinding")[-1] == "waits: the disk is full"
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]


def test_a_job_of_which_a_rank_has_ended_well_is_not_rewound_again(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)
            scene.rewinds.lacks(scene.job.capsules["a/1"], "h2 does not have it")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.job.code == KILLED
    assert scene.history("rewinding")[-1] == "cannot be taken back: a/0 has ended"
    assert scene.job.rewinds == 1
