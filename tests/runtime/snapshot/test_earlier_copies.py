# SPDX-License-Identifier: Apache-2.0
"""Copies of a job from before a rewind or a suspension end on every host that is up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from rewind_scene import RewindScene

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime.snapshot.earlier_copies import EarlierCopies


class Stop(LiveshiftError):
    """This is of no use any more."""


class CopiesScene(RewindScene):
    """The job gpt last ran on h0 and h1; h1 is down. ``needed``: the hosts that must have ended
    their copies. ``stopped``: whether the work is of use no more."""

    def __init__(self) -> None:
        super().__init__()
        self.needed = {"h0", "h2"}
        self.texts: list[str] = []
        self.then = 0
        self.stopped = False
        self.rounds = 0
        self.copies = EarlierCopies(self, self.job, ["h3"], self.texts.append, self._check)

    def _check(self) -> None:
        self.rounds += 1
        if self.stopped:
            raise Stop("it was resumed")

    async def _then(self) -> None:
        assert self.needed <= self.ended
        self.then += 1

    def end(self) -> Coroutine[Any, Any, None]:
        return self.copies.end(lambda: set(self.needed), self._then)

    def orders(self) -> list[str]:
        return [line.split()[1] for line in self.said if line.startswith("EndEarlier")]


@pytest.fixture
def scene() -> CopiesScene:
    return CopiesScene()


async def rounds(scene: CopiesScene, count: int) -> None:
    until = scene.rounds + count
    async with asyncio.timeout(10):
        while scene.rounds < until:
            await asyncio.sleep(0.001)


def test_all_hosts_that_are_up_and_had_a_capsule_are_asked_once(scene: CopiesScene) -> None:
    asyncio.run(scene.end())
    assert scene.orders() == ["h0", "h2", "h3"]
    assert (scene.then, scene.texts) == (1, [])


def test_a_host_that_has_not_ended_its_copy_is_asked_again_and_the_reason_is_noted_once(
    scene: CopiesScene,
) -> None:
    scene.fails["EndEarlier h2"] = [Refused("it is busy"), Refused("it is busy"), Refused("still")]
    asyncio.run(scene.end())
    assert scene.orders().count("h2") == 4
    assert scene.orders().count("h0") == 1
    assert scene.texts == [
        "earlier copies are left on h2: it is busy",
        "earlier copies are left on h2: still",
    ]
    assert scene.then == 1


def test_a_host_that_need_not_have_ended_its_copy_is_not_waited_for(scene: CopiesScene) -> None:
    scene.fails["EndEarlier h3"] = [Unreachable("h3 does not answer")]
    asyncio.run(scene.end())
    assert scene.then == 1
    assert scene.texts == ["earlier copies are left on h3: h3 does not answer"]


def test_it_waits_for_one_of_the_hosts_on_which_the_job_last_ran_as_a_whole(
    scene: CopiesScene,
) -> None:
    async def play() -> None:
        scene.up -= {"h0"}
        scene.needed = {"h2"}
        work = asyncio.ensure_future(scene.end())
        await rounds(scene, 3)
        assert scene.then == 0
        assert scene.orders() == ["h2", "h3"]
        waits = "waits until one of h0, h1 has ended its copy: the job may train there. If one"
        waits += " is dead: `liveshift rewind gpt --lost HOST`"
        assert scene.texts == [waits]
        scene.up.add("h1")
        await work

    asyncio.run(play())
    assert scene.orders() == ["h2", "h3", "h1"]
    assert scene.then == 1


def test_hosts_that_are_needed_from_a_later_round_on_are_asked_too(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.needed = {"h2"}
        scene.fails["EndEarlier h2"] = [Refused("it is busy")] * 5
        work = asyncio.ensure_future(scene.end())
        await rounds(scene, 1)
        scene.up.add("h1")
        scene.needed = {"h1", "h2"}
        await work

    asyncio.run(play())
    assert set(scene.orders()) == {"h0", "h1", "h2", "h3"}
    assert scene.then == 1


def test_it_ends_once_it_is_of_no_use_any_more(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.fails["EndEarlier h2"] = [Refused("it is busy")] * 1000
        work = asyncio.ensure_future(scene.end())
        await rounds(scene, 2)
        scene.stopped = True
        with pytest.raises(Stop):
            await work

    asyncio.run(play())
    assert scene.then == 0


def test_what_follows_may_fail_and_the_error_is_passed_on(scene: CopiesScene) -> None:
    async def full() -> None:
        raise LiveshiftError("the disk is full")

    with pytest.raises(LiveshiftError, match="the disk is full"):
        asyncio.run(scene.copies.end(lambda: set(scene.needed), full))


def test_the_job_knows_then_which_capsules_had_run(scene: CopiesScene) -> None:
    scene.ran_on = {"h0": ["gpt/0"], "h3": ["gpt/2"], "h1": ["gpt/1"]}
    asyncio.run(scene.end())
    assert scene.job.ran_on == {"gpt/0", "gpt/2"}, "h1 is down"
