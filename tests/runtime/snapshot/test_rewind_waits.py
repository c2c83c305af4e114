# SPDX-License-Identifier: Apache-2.0
"""A rewind that is written waits for the holder of an image: nothing is worn out meanwhile, neither
the history, nor the journal, nor the capsule's place."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from rewind_scene import RewindScene
from waits import until_async

from liveshift.errors import Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.messages import Message
from liveshift.runtime.model.jobs import Capsule
from liveshift.runtime.snapshot.rewind import RewindEnd
from liveshift.runtime.snapshot.rewound_capsule import MOST_NOTED


class Scene(RewindScene):
    """h2 holds all images, and both capsules are on other hosts: h0, and the spare h3. It is away
    once the first capsule asks it for an image, as it is brought back."""

    def __init__(self, away_at: str = "GetHeld h2") -> None:
        super().__init__()
        self.job.capsules["gpt/1"].host = "h3"
        self.away_at = away_at
        self.looks = 0

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        if isinstance(message, messages.GetHeld) and self.restoring and self.away_at:
            self.looks += 1
            if self.looks > len(self.job.capsules):  # before that, for the files on shared paths
                self.up.discard("h2")
        return await super().request(host, message, timeout)


async def back(scene: Scene, waits: int = 60) -> RewindEnd:
    """The end of a rewind whose holder is away for so many heartbeats."""
    work = asyncio.ensure_future(scene.rewind().run())
    await until_async(lambda: bool(scene.notes))
    await asyncio.sleep(waits * scene.cluster.timeouts.heartbeat)
    assert not work.done()
    scene.away_at = ""
    scene.up.add("h2")
    async with asyncio.timeout(20):
        return await work


def test_while_no_holder_is_up_each_capsule_stays_where_it_is() -> None:
    scene = Scene()
    assert asyncio.run(back(scene)) is RewindEnd.DONE
    assert {c.name: (c.host, c.epoch) for c in scene.job.capsules.values()} == {
        "gpt/0": ("h0", 3),
        "gpt/1": ("h3", 3),
    }
    assert not [said for said in scene.said if said.startswith("commit")]
    notes = [text for kind, text in scene.notes if kind == "rewinding"]
    assert len(notes) == len(set(notes)) <= 4, notes
    assert any("no host that holds s17.1" in text for text in notes)


def test_a_restarted_orchestrator_makes_an_attempt_void_only_before_the_next_one() -> None:
    scene = Scene()

    async def play() -> None:
        work = asyncio.ensure_future(scene.rewind().recover())
        await until_async(lambda: bool(scene.notes))
        await asyncio.sleep(0.3)
        assert not [said for said in scene.said if said.startswith("commit")]
        scene.away_at = ""
        scene.up.add("h2")
        async with asyncio.timeout(20):
            assert await work is RewindEnd.DONE

    asyncio.run(play())
    assert [c.epoch for c in scene.job.capsules.values()] == [4, 4]


def test_a_capsule_that_was_let_run_while_its_image_was_looked_for_is_left_alone() -> None:
    """By the attempt of an earlier orchestrator."""

    class Late(RewindScene):
        async def request(self, host: str, message: Message, timeout: float) -> Message | None:
            answer = await super().request(host, message, timeout)
            if isinstance(message, messages.GetHeld) and self.said.count("GetHeld h2") > 2:
                self.job.capsules[message.capsule].granted = True
            return answer

    scene = Late()

    async def play() -> RewindEnd:
        async with asyncio.timeout(20):
            return await scene.rewind().recover()

    assert asyncio.run(play()) is RewindEnd.DONE
    assert [c.epoch for c in scene.job.capsules.values()] == [3, 3]
    assert not [said for said in scene.said if said.startswith(("commit", "Reserve"))]


def test_each_reason_is_told_once_though_hosts_take_turns() -> None:

    class Two(RewindScene):
        def another_host(self, capsule: Capsule, avoid: Collection[str]) -> str:
            if {"h2", "h3"} <= set(avoid):
                raise Refused("no host has room")
            return "h3" if "h2" in avoid else "h2"

    scene = Two()
    scene.fails["Reserve h2"] = [Refused("no memory")] * 40
    scene.fails["Reserve h3"] = [Refused("no memory")] * 40

    async def play() -> RewindEnd:
        async with asyncio.timeout(20):
            return await scene.rewind().run()

    assert asyncio.run(play()) is RewindEnd.DONE
    notes = [text for kind, text in scene.notes if kind == "rewinding"]
    assert len(notes) == len(set(notes)) == 2, notes


def test_a_copy_at_home_is_asked_for_again_if_its_host_was_away() -> None:
    scene = Scene()
    scene.own_copies = {"h0"}
    scene.fails["GetHeld h0"] = [Unreachable("h0 is away")]

    async def play() -> None:
        work = asyncio.ensure_future(scene.rewind().run())
        await until_async(lambda: scene.job.capsules["gpt/0"].granted)
        assert "h2" not in scene.up
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(play())
    forwarded = [host for host, ask in scene.asks if isinstance(ask, messages.ForwardHeld)]
    assert forwarded == ["h0"]


def test_reasons_with_numbers_that_change_do_not_fill_the_history() -> None:
    scene = RewindScene()
    scene.fails["Reserve h2"] = [Refused(f"{n} bytes too few") for n in range(90)]
    scene.fails["Reserve h3"] = [Refused(f"{n} bytes too few") for n in range(90)]

    async def play() -> RewindEnd:
        async with asyncio.timeout(20):
            return await scene.rewind().run()

    assert asyncio.run(play()) is RewindEnd.DONE
    assert len([text for kind, text in scene.notes if kind == "rewinding"]) == MOST_NOTED


class Short(RewindScene):
    """h0 and h2 both hold the image of gpt/0, which goes back in place on h0. That has no memory
    for it while its copy is read there; it has, if the copy may go because h2 sends the image."""

    def __init__(self, *holders: str) -> None:
        super().__init__()
        self.generation.holders["gpt/0"] = list(holders)
        self.generation.own_copies.append("gpt/0")
        self.own_copies = {"h0"}

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        if isinstance(message, messages.Reserve) and host == message.source == "h0":
            self._say("Reserve h0")
            raise Refused("h0 has not enough memory")
        return await super().request(host, message, timeout)


@pytest.mark.parametrize("holders", [["h2"], ["h2", "h0"], ["h0", "h2"]])
def test_without_memory_beside_its_copy_a_host_gets_the_image_from_the_other_holder(
    holders: list[str],
) -> None:
    scene = Short(*holders)

    async def play() -> RewindEnd:
        async with asyncio.timeout(10):
            return await scene.rewind().run()

    assert asyncio.run(play()) is RewindEnd.DONE
    assert scene.job.capsules["gpt/0"].host == "h0"
    sources = [
        m.source for host, m in scene.asks if isinstance(m, messages.Reserve) and host == "h0"
    ]
    assert sources == ["h2"]
