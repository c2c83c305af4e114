# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job are heard and do not reach each other: the job leaves one of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest
from rewinds_scene import RewindsScene, scene

from liveshift.runtime.messages import CapsuleState
from liveshift.runtime.model.jobs import Capsule

__all__ = ["scene"]


class Reports:
    """Heartbeats of both hosts. ``cut``: since when a/0 gets no answer from a/1; 0 for never.
    ``trains``: whether the ranks finish collectives."""

    def __init__(self, scene: RewindsScene) -> None:
        self.scene = scene
        self.cut = time.monotonic()
        self.trains = False
        self.count = 9

    async def come(self) -> None:
        while True:
            self.count += self.trains
            for capsule in self.scene.job.capsules.values():
                if capsule.granted:
                    self._report(capsule)
            await asyncio.sleep(0.02)

    def _report(self, capsule: Capsule) -> None:
        silent = {}
        if self.cut and capsule.name == "a/0":
            peer = self.scene.job.capsules["a/1"]
            silent = {self.scene.job.overlay.address(peer.index): time.monotonic() - self.cut}
        state = CapsuleState(
            capsule.name, capsule.epoch, 2, 0, self.count, 1.0, [0], "true", unanswered=silent
        )
        self.scene.rewinds.note_heartbeat(capsule, state)
        capsule.seen = state


@contextlib.asynccontextmanager
async def reporting(scene: RewindsScene) -> AsyncIterator[Reports]:
    reports = Reports(scene)
    async with scene.at_work():
        task = asyncio.ensure_future(reports.come())
        yield reports
        task.cancel()


@pytest.mark.parametrize("left", ["h1", "h0"])
def test_the_job_leaves_a_host_that_lives_and_that_others_reach_less(
    scene: RewindsScene, left: str
) -> None:
    async def play() -> None:
        scene.kernels -= {left}
        async with reporting(scene):
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


@pytest.mark.parametrize("copies", [{"h0", "h1"}, {"h0"}])
def test_the_host_that_is_left_gives_its_copy_if_no_holder_has_the_image(
    scene: RewindsScene, copies: set[str]
) -> None:
    """The image at the holder is damaged."""
    assert scene.job.newest is not None
    scene.job.newest = dataclasses.replace(scene.job.newest, own_copies=["a/0", "a/1"])
    scene.images, scene.own_copies = False, copies

    async def play() -> None:
        scene.kernels -= {"h1"}
        async with reporting(scene):
            await scene.until(
                lambda: (
                    bool(scene.history("rewound") + scene.history("lost"))
                    or ("cannot be taken back" in str(scene.history("rewinding")))
                )
            )

    asyncio.run(play())
    forwarded = {said for said in scene.said if said.startswith("ForwardHeld")}
    if "h1" in copies:
        assert forwarded == {"ForwardHeld h0", "ForwardHeld h1"}
        assert scene.history("rewound")
    else:
        assert not forwarded
        assert "the image of a/1, is gone: h2 has no s1.1" in str(scene.history("rewinding"))


def test_a_job_that_trains_on_is_left_alone(scene: RewindsScene) -> None:
    async def play() -> None:
        async with reporting(scene) as reports:
            reports.trains = True
            await asyncio.sleep(2.0)

    asyncio.run(play())
    assert scene.history("rewinding") == []
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_without_another_host_the_job_waits_and_goes_on_when_the_link_is_back(
    scene: RewindsScene,
) -> None:
    scene.fleet.cordons |= {"h0": "full", "h2": "full"}

    async def play() -> None:
        async with reporting(scene) as reports:
            await scene.until(lambda: bool(scene.history("rewinding")))
            reports.cut = 0.0
            await asyncio.sleep(0.3)

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert why.startswith("waits: h0 and h1 do not reach each other, and no host has room for a/1")
    assert scene.history("rewound") == []
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}
    assert not scene.rewinds.why_again(scene.job)


def test_a_network_that_is_down_for_all_moves_nobody(scene: RewindsScene) -> None:
    """h2, which is asked, reaches neither of the two."""

    async def play() -> None:
        scene.kernels -= {"h0", "h1"}
        async with reporting(scene) as reports:
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.5)
            reports.cut = 0.0
            await asyncio.sleep(0.3)

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert why.startswith("waits: h0 and h1 do not reach each other, and no other host reaches")
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_ranks_that_end_in_a_cut_are_taken_back_or_end_soon(scene: RewindsScene) -> None:
    """Both hosts stop reporting what has ended. Nothing may be held back for ever then."""

    async def play() -> None:
        ends = [scene.end("a/0", 1), scene.end("a/1", 1)]
        async with reporting(scene) as reports:
            reports.cut = time.monotonic() + 0.2  # not for the suspicion, when the ranks end
            while not scene.job.capsules["a/0"].seen or time.monotonic() < reports.cut + 0.3:
                await asyncio.sleep(0.01)
        async with scene.at_work():
            await scene.until(lambda: not scene.report(ends[0]))

    asyncio.run(play())


def test_a_host_that_was_left_is_taken_only_if_there_is_no_other(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.fleet.left_hosts.note(["h2"], [])
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
    scene.fleet.left_hosts.note(["h2"], [])
    assert scene.rewinds.another_host(capsule, ["h1"]) == "h0"
    assert scene.rewinds.another_host(capsule, ["h1", "h0"]) == "h2"


def test_a_host_that_was_left_comes_after_one_that_was_not(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.fleet.left_hosts.note(["h2"], [])
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][0] == "h0", "though h2 holds the image"
