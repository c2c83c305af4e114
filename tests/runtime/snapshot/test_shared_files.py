# SPDX-License-Identifier: Apache-2.0
"""Files on shared paths are cut back once, before any capsule of a job goes on from a snapshot.
What fails there never stops it, but it waits for those who have the images."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from rewind_scene import FACTS, SURVEY, RewindScene
from waits import until_async

from liveshift.criu_glue.files.identity import Identity
from liveshift.errors import LiveshiftError, NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.messages import Message
from liveshift.runtime.snapshot.rewind import RewindEnd
from liveshift.runtime.snapshot.shared_files import MOST_NAMED, cut_back

LOG, OWN, ODD = b"/shared/log", b"/shared/own", b"/shared/\xff"


class Scene(RewindScene):
    """``written``: what each image says. ``answer``: what the host says that it has cut."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, dict[bytes, int]] = {
            "gpt/0": {LOG: 1000, OWN: 5, ODD: 7},
            "gpt/1": {LOG: 900},
        }
        self.identities: dict[str, dict[bytes, Identity]] = {"gpt/0": {}, "gpt/1": {}}
        self.appended: dict[str, list[bytes]] = {"gpt/0": [LOG, OWN], "gpt/1": []}
        self.answer = messages.CutBackDone([], [])
        self.orders: list[tuple[str, messages.CutBack]] = []

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        if isinstance(message, messages.CutBack):
            assert not any(capsule.granted for capsule in self.job.capsules.values())
            self._say(f"CutBack {host}")
            self.orders.append((host, message))
            self._maybe_fail("CutBack")
            return self.answer
        answer = await super().request(host, message, timeout)
        if isinstance(message, messages.GetHeld):
            written, which = self.written[message.capsule], self.identities[message.capsule]
            appended = self.appended[message.capsule]
            return messages.HeldFacts(SURVEY, FACTS, 1000, written, None, which, appended)
        return answer

    def cut(self) -> str:
        return asyncio.run(cut_back(self, self.job, self.generation))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_size_when_the_last_capsule_was_dumped_counts(scene: Scene) -> None:
    """gpt/1 was dumped first, and was frozen when gpt/0 wrote the last 100 bytes: only the image
    of gpt/0 knows them, so nobody would write them again."""
    assert scene.cut() == ""
    ((host, order),) = scene.orders
    assert host == scene.job.capsules["gpt/0"].host
    assert order.sizes == {LOG: 1000, OWN: 5, ODD: 7}
    assert order.appended == [OWN], "gpt/1 may write the log anywhere"
    assert 0 < order.deadline < scene.cluster.timeouts.prepare
    run = scene.job.request
    assert (order.job, order.uid, order.gid, order.groups) == ("gpt", scene.job.uid, run.gid, [])


def test_a_host_hears_which_file_had_the_name(scene: Scene) -> None:
    """If two capsules were dumped with different ones, it was renamed in between."""
    log, own = Identity(7, 70, 0o644), Identity(8, 80, 0o644)
    scene.identities = {"gpt/0": {LOG: log, OWN: own}, "gpt/1": {LOG: log}}
    scene.cut()
    scene.identities["gpt/1"] = {LOG: Identity(9, 90, 0o644)}
    scene.cut()
    scene.identities["gpt/1"] = {}
    scene.cut()
    told = [order.identities for _, order in scene.orders]
    assert told == [{LOG: log, OWN: own}, {OWN: own}, {OWN: own}]


def test_what_was_done_is_said(scene: Scene) -> None:
    scene.answer = messages.CutBackDone(["/shared/log (by 2 kB)"], ["/shared/own (it is shorter)"])
    assert scene.cut() == (
        "files on shared paths are cut back to what they were: /shared/log (by 2 kB);"
        " left as they are, though they have changed: /shared/own (it is shorter)"
    )
    scene.answer = messages.CutBackDone([f"/shared/{n}" for n in range(MOST_NAMED + 3)], [])
    assert scene.cut().endswith("/shared/4 and 3 more")


def test_without_such_files_no_host_is_asked_to_cut(scene: Scene) -> None:
    scene.written = {"gpt/0": {}, "gpt/1": {}}
    assert scene.cut() == ""
    assert scene.orders == []


def test_nothing_is_cut_once_a_capsule_may_run(scene: Scene) -> None:
    """It may have written again what it is to write."""
    scene.job.capsules["gpt/1"].granted = True
    assert scene.cut() == ""
    assert scene.said == []


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("CutBack", Unreachable("h0 does not answer")),
        ("CutBack", LiveshiftError("an internal error")),
        ("GetHeld", NotFound("it does not hold the image")),
        ("GetHeld", Refused("it is damaged")),
    ],
)
def test_what_fails_is_said_and_raises_nothing(scene: Scene, step: str, error: Any) -> None:
    scene.fails[step] = [error]
    assert scene.cut() == f"its files on shared paths are not cut back: {error}"


def test_without_a_holder_of_each_image_nothing_is_cut(scene: Scene) -> None:
    """The least size is not known then."""
    scene.up.discard("h2")
    with pytest.raises(Unreachable, match=r"holds s17.\d, the image of gpt/\d, answers: h2 is not"):
        scene.cut()
    assert scene.orders == []


def test_a_holder_that_does_not_answer_now_may_do_so_later(scene: Scene) -> None:
    scene.fails["GetHeld"] = [Unreachable("h2 does not answer")]
    with pytest.raises(Unreachable, match="h2 does not answer"):
        scene.cut()
    assert scene.cut() == ""
    assert len(scene.orders) == 1


def test_the_copy_of_a_capsule_s_own_host_says_it_too(scene: Scene) -> None:
    scene.up.discard("h2")
    scene.own_copies = {"h0", "h1"}
    scene.generation = dataclasses.replace(scene.generation, own_copies=["gpt/0", "gpt/1"])
    with pytest.raises(Unreachable, match="the image of gpt/1"):
        scene.cut()  # gpt/1 is not on h1 any more
    scene.up.add("h1")
    scene.job.capsules["gpt/1"].host = "h1"
    assert scene.cut() == ""
    assert len(scene.orders) == 1


@pytest.mark.parametrize("gone", [NotFound("h0 has none"), Refused("it is damaged")])
def test_a_copy_that_is_gone_leaves_it_to_the_holder(scene: Scene, gone: LiveshiftError) -> None:
    scene.generation = dataclasses.replace(scene.generation, own_copies=["gpt/0"])
    scene.up.discard("h2")
    scene.fails["GetHeld h0"] = [gone]
    with pytest.raises(Unreachable, match="the image of gpt/"):
        scene.cut()


def test_the_holder_is_waited_for_before_a_capsule_goes_on(scene: Scene) -> None:
    """Its agent is restarted just when the earlier copies have ended."""
    scene.up.discard("h2")
    scene.job.capsules["gpt/1"].host = "h3"
    scene.answer = messages.CutBackDone(["/shared/log (by 2 kB)"], [])

    async def play() -> RewindEnd:
        work = asyncio.ensure_future(scene.rewind().run())
        await until_async(lambda: any("cannot be cut back yet" in text for _, text in scene.notes))
        await asyncio.sleep(0.3)
        assert not [said for said in scene.said if said.startswith("Reserve")]
        scene.up.add("h2")
        async with asyncio.timeout(20):
            return await work

    assert asyncio.run(play()) is RewindEnd.DONE
    assert scene.said.count("CutBack h0") == 1
    assert [t for _, t in scene.notes if "/shared/log (by 2 kB)" in t]
    assert len([t for _, t in scene.notes if "cannot be cut back yet" in t]) <= 2


def test_a_job_that_is_stopped_does_not_wait_for_the_holder(scene: Scene) -> None:
    scene.up.discard("h2")
    scene.job.capsules["gpt/1"].host = "h3"

    async def play() -> RewindEnd:
        work = asyncio.ensure_future(scene.rewind().run())
        await until_async(lambda: bool(scene.notes))
        scene.job.state = "ending"
        async with asyncio.timeout(20):
            return await work

    assert asyncio.run(play()) is RewindEnd.JOB_ENDS
    assert scene.orders == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_rewind_cuts_after_the_earlier_copies_and_before_the_images_go(
    scene: Scene, fails: bool
) -> None:
    scene.answer = messages.CutBackDone(["/shared/log (by 2 kB)"], [])
    if fails:
        scene.fails["CutBack"] = [Unreachable("h0 does not answer")]
    assert asyncio.run(scene.rewind().run()) is RewindEnd.DONE
    at = scene.said.index("CutBack h0")
    ended = [n for n, said in enumerate(scene.said) if said.startswith("EndEarlier")]
    reserved = [n for n, said in enumerate(scene.said) if said.startswith("Reserve")]
    assert max(ended) < at < min(reserved)
    assert scene.said.count("CutBack h0") == 1
    text = "not cut back: h0 does not answer" if fails else "/shared/log (by 2 kB)"
    assert [kind for kind, said in scene.notes if text in said] == ["rewinding"]


def test_what_ran_on_after_a_suspension_is_cut(scene: Scene) -> None:
    """The resumption came before the suspension had ended its copies."""
    scene.ran = False
    scene.ran_on = {"h0": ["gpt/0"]}
    assert asyncio.run(scene.rewind().run()) is RewindEnd.DONE
    assert scene.said.count("CutBack h0") == 1
    assert scene.job.ran_on == set(), "the next one need not cut again"


@pytest.mark.parametrize("adopted", [False, True])
def test_nothing_is_cut_of_a_job_that_has_not_run_since_its_snapshot(
    scene: Scene, adopted: bool
) -> None:
    """It was suspended, and what has come to its log is of others. One that was saved by another
    cluster, or by this one earlier, may have trained on since."""
    scene.ran = False
    if adopted:
        scene.generation = dataclasses.replace(scene.generation, saved="s4")
    assert asyncio.run(scene.rewind().run()) is RewindEnd.DONE
    assert scene.said.count("CutBack h0") == adopted
