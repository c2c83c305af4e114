# SPDX-License-Identifier: Apache-2.0
"""A job loses a host while no other one has room: it waits, says so, and goes on by itself."""

from __future__ import annotations

import asyncio

import pytest
from rewinds_scene import RewindsScene, scene

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import RunJob
from liveshift.runtime.model.jobs import Capsule, Job

__all__ = ["scene"]

NO_ROOM = "waits: no host has room for a/1, which was on h1"


def fill(scene: RewindsScene) -> None:
    """Another job takes all slots that h0 and h2 have left."""
    hosts = ["h0"] * 3 + ["h2"] * 4
    capsules = {f"b/{n}": Capsule(f"b/{n}", n, host, 1) for n, host in enumerate(hosts)}
    run = RunJob("b", len(hosts), ["true"], {}, "/", 0, [])
    scene.fleet.jobs["b"] = Job("b", Overlay(2, "10.99.1.0/24"), run, 0, 0.0, capsules)


def shown(scene: RewindsScene) -> str:
    """What `status` says of the rewind."""
    found = status(scene.fleet, lambda _: True, sees_all=True, only="a")
    (job,) = found.jobs
    assert job.protection is not None
    return job.protection.rewinding


async def waits(scene: RewindsScene) -> None:
    """h1 loses its power; then some heartbeats pass."""
    fill(scene)
    scene.cut("h1")
    await scene.until(lambda: bool(scene.history("rewinding")))
    await asyncio.sleep(0.5)
    assert scene.history("rewinding") == [NO_ROOM], "said once"
    assert shown(scene) == NO_ROOM
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}
    assert (scene.job.state, scene.job.rewinds) == ("running", 0)
    assert not {line.split()[0] for line in scene.said} & {"EndEarlier", "RestoreCapsule"}


def test_it_goes_on_once_a_slot_is_free(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await waits(scene)
            scene.fleet.jobs["b"].capsules["b/6"].code = 0  # one of h2
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}
    assert scene.job.state == "running"
    assert scene.history("rewinding")[1:] == ["goes back to s1: h1 is silent, and so is its kernel"]
    assert shown(scene) == ""


def test_it_goes_on_where_it_is_if_the_host_returns_with_its_capsule(scene: RewindsScene) -> None:
    """Its link was cut. Nothing of the job is lost then, and nothing is repeated."""

    async def play() -> None:
        async with scene.at_work():
            await waits(scene)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await scene.until(lambda: not scene.rewinds.why_again(scene.job))
            del scene.fleet.jobs["b"]  # now there is room, and none is needed
            await asyncio.sleep(0.5)

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}
    assert scene.history("rewinding") == [NO_ROOM]
    assert shown(scene) == ""
    assert (scene.job.state, scene.job.rewinds) == ("running", 0)
    assert scene.fleet.failures.seen.losses == 0


def test_nothing_is_done_if_the_host_returns_just_before_the_rewind_begins(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        scene.rewinds._spawn(scene.job, scene.rewinds._follow(scene.job))
        assert not scene.rewinds.why_again(scene.job), "it was heard after the look"
        await asyncio.sleep(0.05)

    asyncio.run(play())
    assert (scene.history("rewinding"), scene.job.state) == ([], "running")


def test_it_goes_back_on_the_host_that_returns_without_its_capsule(scene: RewindsScene) -> None:
    """It was booted again. The holder sends the image there."""

    async def play() -> None:
        async with scene.at_work():
            await waits(scene)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h1", 3, True)}
    assert scene.job.state == "running"
    assert "ForwardHeld h2" in scene.said
    assert scene.history("rewinding")[1:] == ["goes back to s1: h1 came back without a/1"]


@pytest.mark.parametrize("room", [True, False])
def test_a_restarted_orchestrator_waits_too(scene: RewindsScene, room: bool) -> None:
    async def begins() -> None:
        async with scene.at_work():
            await waits(scene)

    async def goes_on() -> None:
        async with scene.at_work():
            if room:
                await scene.until(lambda: bool(scene.history("rewound")))
            else:
                fill(scene)
                await scene.until(lambda: len(scene.history("rewinding")) == 2)

    asyncio.run(begins())
    scene.begin(Fleet(scene.fleet.cluster))
    asyncio.run(goes_on())
    assert scene.owners()["a/1"] == (("h2", 3, True) if room else ("h1", 1, True))
