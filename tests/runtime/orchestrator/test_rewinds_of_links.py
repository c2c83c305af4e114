# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job are heard and do not reach each other: the job leaves one of them."""

from __future__ import annotations

import asyncio
import time

import pytest
from rewinds_scene import RewindsScene, scene

from liveshift.runtime.messages import CapsuleState

__all__ = ["scene"]

CUT_S = 5.0


def report(scene: RewindsScene, name: str, seconds: float, *, count: int = 9) -> None:
    """A capsule's host reports that the other capsule does not answer; 0 for one that does."""
    capsule = scene.job.capsules[name]
    (peer,) = (c for c in scene.job.capsules.values() if c is not capsule)
    silent = {scene.job.overlay.address(peer.index): seconds} if seconds else {}
    state = CapsuleState(name, capsule.epoch, 2, 0, count, 1.0, [0], "true", unanswered=silent)
    scene.rewinds.note_heartbeat(capsule, state)
    capsule.seen = state


@pytest.mark.parametrize("left", ["h1", "h0"])
def test_the_job_leaves_a_host_that_lives_and_that_others_reach_less(
    scene: RewindsScene, left: str
) -> None:
    async def play() -> None:
        scene.kernels -= {left}
        async with scene.at_work():
            report(scene, "a/0", CUT_S)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    stays = {"h0": "h1", "h1": "h0"}[left]
    assert scene.history("rewinding") == ["goes back to s1: h0 and h1 do not reach each other"]
    assert sorted(host for host, _, _ in scene.owners().values()) == [stays, "h2"]
    assert f"EndEarlier {left}" in scene.said, "it ends its copy at once"
    assert scene.said.index(f"EndEarlier {left}") < scene.said.index("Reserve h2")
    assert scene.fleet.left_hosts.recent() == {left}
    (row,) = scene.fleet.journal.snapshots.history("a")
    assert row.lost == [left]


def test_a_job_that_trains_on_is_left_alone(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            for count in range(200):
                report(scene, "a/0", CUT_S, count=count)
                await asyncio.sleep(0.01)

    asyncio.run(play())
    assert scene.history("rewinding") == []
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_without_another_host_the_job_waits_and_goes_on_when_the_link_is_back(
    scene: RewindsScene,
) -> None:
    scene.fleet.cordons |= {"h0": "full", "h2": "full"}

    async def play() -> None:
        async with scene.at_work():
            report(scene, "a/0", CUT_S)
            await scene.until(lambda: bool(scene.history("rewinding")))
            report(scene, "a/0", 0.0)
            await asyncio.sleep(0.3)

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert why.startswith("waits: h0 and h1 do not reach each other, and no host has room for a/1")
    assert scene.history("rewound") == []
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}
    assert not scene.rewinds.why_again(scene.job)


def test_a_host_that_was_left_is_taken_only_if_there_is_no_other(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.fleet.left_hosts.note(["h2"])
        scene.fleet.cordons["h0"] = "full"
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][0] == "h2", "it is better than none"


def test_another_attempt_to_restore_goes_to_a_host_that_was_left_last(scene: RewindsScene) -> None:
    for host in scene.fleet.hosts.values():
        host.heard = time.monotonic()
    capsule = scene.job.capsules["a/1"]
    assert scene.rewinds.another_host(capsule, ["h1"]) == "h2", "it is empty"
    scene.fleet.left_hosts.note(["h2"])
    assert scene.rewinds.another_host(capsule, ["h1"]) == "h0"
    assert scene.rewinds.another_host(capsule, ["h1", "h0"]) == "h2"


def test_a_host_that_was_left_comes_after_one_that_was_not(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.fleet.left_hosts.note(["h2"])
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][0] == "h0", "though h2 holds the image"
