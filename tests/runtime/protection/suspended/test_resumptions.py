# SPDX-License-Identifier: Apache-2.0
"""A suspended job is resumed: it goes on from its last snapshot, or stays suspended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable

import pytest
from suspensions_scene import BOUNDARY, SuspensionsScene, scene

from liveshift.errors import Refused
from liveshift.runtime.fleet.fleet import Fleet

__all__ = ["scene"]

ALL_SLOTS = {"h0": 4, "h1": 4, "h2": 4}


def cut_off(scene: SuspensionsScene, *hosts: str) -> Callable[[], bool]:
    """Cut hosts off; returns what says that they count as down."""
    scene.cut(*hosts)
    return lambda: not any(map(scene.fleet.is_up, hosts))


# ---- one that succeeds -----------------------------------------------------------------------


def test_a_resumed_job_goes_on_from_its_last_snapshot(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.said.clear()
            ordered = await scene.resume()
            assert (ordered.job, ordered.snapshot, ordered.boundary) == ("a", "s2", BOUNDARY)
            assert ordered.where == {"a/0": "h2", "a/1": "h2"}, "each where its image is"
            assert 0 <= ordered.suspended_s < 20
            await scene.until(lambda: bool(scene.history("resumed")))
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.owners() == {"a/0": ("h2", 5, True), "a/1": ("h2", 5, True)}
    assert scene.kinds() == ["suspending", "suspended", "resuming", "resumed"]
    assert scene.history("resuming") == ["goes on from s2: a/0 on h2, a/1 on h2"]
    (text,) = scene.history("resumed")
    assert text.startswith("runs again from s2: a/0 on h2, a/1 on h2; ")
    assert "; it was suspended for " in text
    assert "repeated" not in text
    assert not scene.history("rewound")
    restored = [n for n, line in enumerate(scene.said) if line.startswith("RestoreCapsule")]
    assert max(restored) < scene.said.index("open")
    assert scene.fleet.journal.snapshots.rewinds_under_way() == []
    again = Fleet(scene.fleet.cluster).jobs["a"]
    assert (again.state, again.rewinds) == ("running", 2)


def test_how_long_a_job_was_suspended_is_counted_from_its_boundary(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            began = time.time()
            await scene.suspend()
            await asyncio.sleep(0.5)
            ordered = await scene.resume()
            assert 0.5 <= ordered.suspended_s <= time.time() - began
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    (text,) = scene.history("resumed")
    seconds = float(text.partition("it was suspended for ")[2].removesuffix(" s"))
    assert 0.4 < seconds < 20


def test_a_dry_run_only_says_where(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            plan = scene.suspensions.suspend("root", scene.job, dry_run=True)
            assert plan.holders == {"a/0": "h2", "a/1": "h2"}
            await asyncio.sleep(0.2)
            assert scene.job.state == "running"
            assert not scene.history("suspending")
            await scene.suspend()
            scene.said.clear()
            ordered = await scene.suspensions.resume("root", scene.job, dry_run=True)
            assert ordered.where == {"a/0": "h2", "a/1": "h2"}
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.said == []
    assert not scene.history("resuming")


def test_a_job_goes_to_hosts_with_room_if_its_holder_takes_no_capsule(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.fleet.taints["h2"] = ("hot", "root")
            scene.cut("h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            ordered = await scene.resume()
            assert ordered.where == {"a/0": "h0", "a/1": "h0"}
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 5, True), "a/1": ("h0", 5, True)}


def test_nothing_is_restored_before_an_earlier_copy_has_ended(scene: SuspensionsScene) -> None:
    """A person may be faster than the end of the copies."""

    async def play() -> None:
        ends = scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.job.state == "suspended")
            await scene.resume()
            await asyncio.sleep(0.2)
            assert not scene.asked("Reserve")
            scene.held.clear()
            ends.set()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.job.state == "running"


def test_a_job_that_is_resumed_before_its_copies_have_ended_is_not_noted_as_suspended(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        ends = scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.ended_on() == {"h0", "h1"})
            await scene.resume()
            scene.held.clear()
            ends.set()
            await scene.until(lambda: bool(scene.history("resumed")))
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.kinds() == ["suspending", "resuming", "resumed"]


def test_a_job_that_was_resumed_can_be_suspended_again(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.resume()
            await scene.until(lambda: scene.job.state == "running")
            await scene.suspend()

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.job.newest is not None
    assert scene.job.newest.holders == {"a/0": ["h0"], "a/1": ["h1"]}
    assert scene.job.rewinds == 3


def test_a_second_order_while_the_last_snapshot_is_taken_suspends_the_job_only_once(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        writes = scene.held["CheckHeld"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "CheckHeld h2" in scene.said)
            with contextlib.suppress(Refused):  # as good an answer
                scene.order()
            scene.held.clear()
            writes.set()
            await scene.until(lambda: bool(scene.history("suspended")))
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))
            await asyncio.sleep(0.5)

    asyncio.run(play())
    assert scene.job.state == "running", "nobody wants it suspended any more"


# ---- one that is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("hindrance", "why"),
    [
        ("no room", "a cannot be resumed: no host has room for a/0"),
        (
            "no holder",
            "a cannot be resumed: no host that holds a/0 is up: the image of s2 is on h2",
        ),
    ],
)
def test_a_job_that_cannot_be_resumed_now_stays_suspended(
    scene: SuspensionsScene, hindrance: str, why: str, dry_run: bool
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            if hindrance == "no room":
                scene.another_job(ALL_SLOTS)
            else:
                await scene.until(cut_off(scene, "h2"))
            with pytest.raises(Refused) as refused:
                await scene.suspensions.resume("root", scene.job, dry_run=dry_run)
            assert refused.value.message.startswith(why)
            assert not refused.value.message.endswith(" "), refused.value.message
            assert "it stays suspended" in (refused.value.hint or "")

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.job.rewinds == 1
    assert not scene.history("resuming")


def test_a_job_whose_image_is_gone_stays_suspended(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.images = False
            with pytest.raises(Refused) as refused:
                await scene.resume()
            why = "a cannot be resumed: s2.0, the image of a/0, is gone: h2 has no s2.0"
            assert str(refused.value) == why
            assert refused.value.hint == "`liveshift stop a` gives the job up"
            scene.images = True
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.kinds() == ["suspending", "suspended", "resuming", "resumed"]
    assert scene.job.rewinds == 2


def test_a_job_whose_image_is_gone_and_which_was_saved_once_can_go_back_to_that(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.fleet.journal.snapshots.note_saved("a", "s1", "/kept", time.time())
            scene.images = False
            with pytest.raises(Refused, match=r"`liveshift resume a --from /kept` goes back to it"):
                await scene.resume()

    asyncio.run(play())


def test_a_job_of_which_no_snapshot_is_left_can_only_be_stopped(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.job.newest = None
            with pytest.raises(Refused, match="a cannot be resumed: no snapshot of it") as refused:
                await scene.resume()
            assert refused.value.hint == "`liveshift stop a`"

    asyncio.run(play())
    assert scene.job.state == "suspended"


@pytest.mark.parametrize("state", ["running", "rewinding", "ending", "ended"])
def test_a_job_that_is_not_suspended_is_not_resumed(scene: SuspensionsScene, state: str) -> None:
    scene.job.state = state
    why = f"a cannot be resumed: it is {state}, not suspended"
    with pytest.raises(Refused, match=why):
        asyncio.run(scene.resume())
    assert scene.job.rewinds == 0


def test_of_two_resumptions_at_once_the_second_is_refused(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            looks = scene.held["GetHeld"] = asyncio.Event()
            both = [asyncio.ensure_future(scene.resume()) for _ in range(2)]
            await scene.until(lambda: len(scene.asked("GetHeld")) == 2)
            scene.held.clear()
            looks.set()
            done = await asyncio.gather(*both, return_exceptions=True)
            (refused,) = [each for each in done if isinstance(each, BaseException)]
            assert isinstance(refused, Refused)
            assert "it is rewinding, not suspended" in str(refused)
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.job.rewinds == 2


def test_a_resumption_is_planned_again_if_a_host_is_full_or_dead_meanwhile(
    scene: SuspensionsScene,
) -> None:
    """It would go to its holder, which another job fills, and then to hosts of which one dies."""

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            looks = scene.held["GetHeld"] = asyncio.Event()
            resuming = asyncio.ensure_future(scene.resume())
            await scene.until(lambda: bool(scene.asked("GetHeld")))
            scene.another_job({"h2": 4})
            await scene.until(cut_off(scene, "h0"))
            scene.held.clear()
            looks.set()
            ordered = await resuming
            assert ordered.where == {"a/0": "h1", "a/1": "h1"}
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.history("resuming") == ["goes on from s2: a/0 on h1, a/1 on h1"]
    assert scene.owners() == {"a/0": ("h1", 5, True), "a/1": ("h1", 5, True)}


def test_another_holder_is_asked_if_one_dies_meanwhile(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            assert scene.job.newest is not None
            both = {name: ["h2", "h1"] for name in scene.job.capsules}
            scene.job.newest = dataclasses.replace(scene.job.newest, holders=both)
            looks = scene.held["GetHeld"] = asyncio.Event()
            resuming = asyncio.ensure_future(scene.resume())
            await scene.until(lambda: bool(scene.asked("GetHeld")))
            dies = scene.asked("GetHeld")[0]
            (other,) = {"h1", "h2"} - {dies}
            await scene.until(cut_off(scene, dies))
            scene.held.clear()
            looks.set()
            ordered = await resuming
            assert ordered.where == {"a/0": other, "a/1": other}
            assert scene.asked("GetHeld")[-1] == other

    asyncio.run(play())


def test_a_resumption_takes_no_slot_that_was_taken_while_the_holders_were_asked(
    scene: SuspensionsScene,
) -> None:
    """Two suspended jobs may be resumed at the same time."""

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            looks = scene.held["GetHeld"] = asyncio.Event()
            resuming = asyncio.ensure_future(scene.resume())
            await scene.until(lambda: bool(scene.asked("GetHeld")))
            scene.another_job(ALL_SLOTS)
            scene.held.clear()
            looks.set()
            with pytest.raises(Refused, match="no host has room"):
                await resuming

    asyncio.run(play())
    assert scene.job.state == "suspended"
