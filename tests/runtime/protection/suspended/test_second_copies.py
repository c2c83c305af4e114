# SPDX-License-Identifier: Apache-2.0
"""Each image of a suspended job goes on to a second host. The journal, the judge of claims and the
plan are real; hosts are stand-ins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from rewind_scene import FACTS, SURVEY
from suspensions_scene import SuspensionsScene

from liveshift.errors import NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import Message, ProtectionRow
from liveshift.runtime.model.snapshots import HELD
from liveshift.runtime.protection import second_copies

DIGEST = b"0123456789abcdef"


class CopiesScene(SuspensionsScene):
    """``sent``: the copies that were ordered: image, from, to. ``digest``: what holders have."""

    copies = True

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, str, str]] = []
        self.holds: list[messages.Hold] = []
        self.checks: list[messages.CheckHeld] = []
        self.digest = DIGEST
        self.patch = monkeypatch
        self.wait_for_hosts(0.1)
        super().__init__(state, monkeypatch)

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        answer = await super().request(host, message, limit)
        if isinstance(message, messages.GetHeld):
            return messages.HeldFacts(SURVEY, FACTS, 1000, digest=self.digest)
        copied = isinstance(message, messages.ForwardHeld) and message.migration == message.image
        if copied and isinstance(message, messages.ForwardHeld):
            self.sent.append((message.image, host, message.destination))
        if isinstance(message, messages.Hold) and message.anew:
            self.holds.append(message)
        if isinstance(message, messages.CheckHeld) and message.digest == self.digest:
            self.checks.append(message)
        return answer

    def wait_for_hosts(self, seconds: float) -> None:
        """A host that was silent for less than that may soon be back."""
        self.patch.setattr(second_copies, "AWAY_S", seconds)

    def kept_on(self) -> dict[str, list[str]]:
        """Who has which image, in memory and in the journal."""
        newest = self.job.newest
        assert newest is not None
        assert self.fleet.journal.snapshots.newest("a") == newest
        return newest.holders

    def row(self) -> ProtectionRow:
        found = status(self.fleet, lambda _job: True, sees_all=True).jobs[0].protection
        assert found is not None
        return found

    def claim_image(self, host: str, image: str, *, ready: bool) -> str:
        """The ruling on what a host has of an image."""
        name = "a/" + image.partition(".")[2]
        claim = messages.Claim(image, name, HELD, 1, ready=ready, rewinds=0)
        return self.parts.claims.rule(host, claim).ruling


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopiesScene:
    return CopiesScene(tmp_path, monkeypatch)


def test_each_image_goes_on_to_another_host(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(play())
    assert scene.sent == [("s2.0", "h2", "h0"), ("s2.1", "h2", "h1")]
    assert scene.kept_on() == {"a/0": ["h2", "h0"], "a/1": ["h2", "h1"]}
    for hold, check in zip(scene.holds, scene.checks, strict=True):
        assert (hold.source, hold.own, hold.anew, check.image) == ("h2", False, True, hold.image)
        assert hold.epoch == 1, "of the copy that was dumped"
    (text,) = scene.history("copied")
    assert text == "s2 is in the memory of h0, h1, h2: each image on two of them"
    assert (scene.row().alone, scene.row().holders) == ([], ["h0", "h1", "h2"])
    for host in ("h0", "h2"):
        assert scene.claim_image(host, "s2.0", ready=True) == "wait"
    assert scene.claim_image("h1", "s2.0", ready=True) == "end"
    assert scene.job.copying_to == {}


def test_nothing_is_copied_before_the_job_has_left_its_hosts(scene: CopiesScene) -> None:
    async def play() -> None:
        ends = scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.ended_on() == {"h0", "h1"})
            await asyncio.sleep(0.2)
            assert not scene.holds
            assert scene.row().alone == ["h2"]
            scene.held.clear()
            ends.set()
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(play())


def test_what_a_dead_holder_had_is_copied_again(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            await scene.until(lambda: len(scene.history("copied")) == 2)
            assert scene.sent[2:] == [("s2.0", "h0", "h1"), ("s2.1", "h1", "h0")]
            assert scene.kept_on() == {"a/0": ["h0", "h1"], "a/1": ["h1", "h0"]}
            assert (scene.row().alone, scene.row().why_not) == ([], "")
            ordered = await scene.resume()
            assert set(ordered.where.values()) == {"h0", "h1"}
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())


def test_a_holder_that_has_lost_its_memory_does_not_count(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            scene.fleet.hosts["h0"].lost = frozenset({"s2.0"})
            await scene.until(lambda: len(scene.history("copied")) == 2)

    asyncio.run(play())
    assert scene.sent[2:] == [("s2.0", "h2", "h0")], "it has least to hold now"
    assert scene.kept_on() == {"a/0": ["h2", "h0"], "a/1": ["h2", "h1"]}
    assert scene.fleet.hosts["h0"].lost == frozenset()


def test_a_resumption_does_not_wait_for_a_copy(scene: CopiesScene) -> None:
    """It restores the job from where the images are; what has come of the copy goes."""

    async def play() -> None:
        forwards = scene.held["ForwardHeld"] = asyncio.Event()
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: scene.job.copying_to == {"s2.0": "h0"})
            await scene.until(lambda: bool(scene.asked("ForwardHeld")))
            assert scene.claim_image("h0", "s2.0", ready=False) == "wait"
            assert scene.claim_image("h1", "s2.0", ready=False) == "end"
            await scene.resume()
            await scene.until(lambda: scene.job.copying_to == {})
            assert scene.claim_image("h0", "s2.0", ready=False) == "end"
            scene.held.clear()
            forwards.set()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.sent == []
    assert not scene.history("copied")
    assert not scene.history("not copied")


def test_a_copy_that_is_done_meanwhile_does_not_hinder_a_resumption(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            checks = scene.held["CheckHeld h0"] = asyncio.Event()
            await scene.suspend()
            await scene.until(lambda: "CheckHeld h0" in scene.said)
            looks = scene.held["GetHeld"] = asyncio.Event()
            resuming = asyncio.ensure_future(scene.resume())
            await scene.until(lambda: len(scene.asked("GetHeld")) == 2)
            del scene.held["CheckHeld h0"]
            checks.set()
            await scene.until(lambda: scene.kept_on()["a/0"] == ["h2", "h0"])
            scene.held.clear()
            looks.set()
            await resuming
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())


def test_a_host_that_cannot_take_a_copy_is_passed_over(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.fails["Hold h0"] = [Refused("h0 cannot hold the image: no room")]
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(play())
    assert scene.kept_on() == {"a/0": ["h2", "h1"], "a/1": ["h2", "h1"]}
    assert scene.history("not copied") == [
        "an image of s2 is on one host only: h0 cannot hold the image: no room"
    ]
    assert scene.asked("Hold").count("h0") == 1


def test_a_copy_that_differs_is_no_copy(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.fails["CheckHeld h0"] = [StepFailed("hold", "it is not what h2 has")]
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("not copied")))
            assert scene.kept_on()["a/0"] == ["h2"]
            assert scene.row().alone == ["h2"]
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(play())


def test_a_holder_whose_image_is_gone_has_lost_it(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.fails["GetHeld h2"] = [NotFound("the image s2.0 is damaged, so it was removed")]
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("not copied")))
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert not scene.history("copied")
    assert scene.history("not copied") == [
        "an image of s2 is on one host only: the image s2.0 is damaged, so it was removed"
    ]
    assert scene.kept_on() == {"a/0": ["h2"], "a/1": ["h2", "h0"]}
    assert scene.row().why_not == "h2, which kept s2, has lost its memory since"


def test_where_no_other_host_can_hold_it_that_is_said_once(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.fleet.taints |= dict.fromkeys(("h0", "h1"), ("because", "root"))
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("not copied")))
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert scene.history("not copied") == [
        "an image of s2 is on one host only: no other host can hold the image of a/0: h0 is tainted"
        " or cordoned (1 more as well); h2 has it already"
    ]
    assert scene.row().alone == ["h2"]


def test_a_failure_is_noted_once_and_tried_again_later_and_later(scene: CopiesScene) -> None:
    """The numbers in it change. A job may rest for days."""

    async def play() -> None:
        async with scene.at_work():
            left = (f"h0 is full: {n}.5 GB are left" for n in range(1, 100))
            scene.fails["GetHeld h2"] = [Refused(text, hint="free some") for text in left]
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("not copied")))
            await asyncio.sleep(1.5)

    asyncio.run(play())
    (text,) = scene.history("not copied")
    assert text == "an image of s2 is on one host only: h0 is full: 1.5 GB are left (free some)"
    assert 2 <= len(scene.asked("GetHeld")) <= 2 * 6, "after 0.1, 0.2, 0.4, 0.8 s and so on"


def test_a_holder_that_may_soon_be_back_counts(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            scene.wait_for_hosts(60.0)
            scene.cut("h0")
            await scene.until(lambda: not scene.fleet.is_up("h0"))
            await asyncio.sleep(0.3)
            assert len(scene.sent) == 2
            assert scene.row().alone == ["h2"], "a drain warns of it all the same"
            scene.wait_for_hosts(0.1)
            await scene.until(lambda: len(scene.history("copied")) == 2)

    asyncio.run(play())
    assert scene.sent[2:] == [("s2.0", "h2", "h1")]


def test_a_copy_is_given_up_if_an_earlier_holder_comes_back(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            checks = scene.held["CheckHeld h1"] = asyncio.Event()
            scene.cut("h0")
            await scene.until(lambda: "CheckHeld h1" in scene.said[-3:])
            scene.alive.add("h0")
            await scene.until(lambda: scene.fleet.is_up("h0"))
            scene.held.clear()
            checks.set()
            await scene.until(lambda: scene.job.copying_to == {})
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert scene.kept_on() == {"a/0": ["h2", "h0"], "a/1": ["h2", "h1"]}
    assert scene.claim_image("h1", "s2.0", ready=True) == "end"


def test_a_restarted_orchestrator_waits_for_the_holders(scene: CopiesScene) -> None:
    async def copied() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))

    async def restarted() -> None:
        scene.cut("h0")
        async with scene.at_work():
            await scene.until(lambda: scene.fleet.is_up("h2"))
            await asyncio.sleep(0.6)
            assert len(scene.sent) == 2
            scene.alive.add("h0")
            await asyncio.sleep(1.5)

    asyncio.run(copied())
    scene.restart()
    asyncio.run(restarted())
    assert len(scene.sent) == 2


def test_what_has_come_to_a_holder_on_record_is_no_image(scene: CopiesScene) -> None:
    """It has lost its memory, and another orchestrator has begun to copy the image there anew."""

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(play())
    assert scene.claim_image("h0", "s2.0", ready=True) == "wait"
    assert scene.claim_image("h0", "s2.0", ready=False) == "end"


def test_a_holder_that_is_away_is_waited_for_if_the_other_one_has_lost_the_image(
    scene: CopiesScene,
) -> None:
    async def play() -> None:
        scene.wait_for_hosts(60.0)
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            scene.fleet.hosts["h0"].lost = frozenset({"s2.0"})
            assert scene.row().why_not == "h2, which keeps s2, is not up"
            with pytest.raises(Refused, match=r"no host that holds a/0 is up: .* is on h2"):
                await scene.resume()
            scene.fleet.hosts["h0"].lost = frozenset()
            scene.fails["GetHeld h0"] = [NotFound("h0 does not hold the image s2.0 (any more)")]
            with pytest.raises(Refused, match=r"no host that holds a/0 is up: .* is on h2"):
                await scene.resume()
            scene.alive.add("h2")
            await scene.until(lambda: scene.fleet.is_up("h2"))
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))
            assert not scene.suspensions._second._next
            assert not scene.suspensions._second._noted

    asyncio.run(play())


def test_images_are_saved_by_whichever_holder_is_up(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            assert scene.job.newest is not None
            crossed = {"a/0": ["h2", "h0"], "a/1": ["h0", "h2"]}
            scene.job.newest = replace(scene.job.newest, holders=crossed)
            scene.wait_for_hosts(60.0)
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            scene.suspensions.suspend("root", scene.job, to="/kept", dry_run=False)
            await scene.until(lambda: bool(scene.asked("SaveHeld")))
            await scene.until(lambda: bool(scene.history("not saved")))

    asyncio.run(play())
    assert set(scene.asked("SaveHeld")) == {"h0"}


def test_an_image_without_a_digest_is_not_copied(scene: CopiesScene) -> None:
    async def play() -> None:
        scene.digest = b""
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("not copied")))

    asyncio.run(play())
    assert "h2 has no digest of s2.0" in scene.history("not copied")[0]
    assert not scene.holds


def test_a_restarted_orchestrator_copies_from_the_beginning(scene: CopiesScene) -> None:
    """It does not know what was on its way: the host gives that up (Hold.anew)."""

    async def begins() -> None:
        scene.held["ForwardHeld"] = asyncio.Event()
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.asked("ForwardHeld")))

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("copied")))

    asyncio.run(begins())
    scene.held.clear()
    scene.restart()
    assert scene.claim_image("h0", "s2.0", ready=False) == "end"
    asyncio.run(goes_on())
    assert [hold.image for hold in scene.holds] == ["s2.0", "s2.0", "s2.1"]
    assert scene.kept_on() == {"a/0": ["h2", "h0"], "a/1": ["h2", "h1"]}


def test_a_job_that_a_directory_has_is_not_copied(scene: CopiesScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.until(lambda: bool(scene.history("copied")))
            assert scene.job.newest is not None
            scene.job.newest = replace(
                scene.job.newest, directory="/kept", holders={"a/0": ["h2"], "a/1": ["h2"]}
            )
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert len(scene.sent) == 2
    assert scene.row().alone == []
