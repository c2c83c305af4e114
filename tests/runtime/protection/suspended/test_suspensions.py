# SPDX-License-Identifier: Apache-2.0
"""A suspended job leaves all its hosts, and stays suspended until it is resumed or stopped."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from full_journal import empty, fill
from suspensions_scene import SuspensionsScene, scene
from waits import until_async

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.status import status
from liveshift.runtime.messages import Claim
from liveshift.runtime.model.jobs import KILLED

__all__ = ["scene"]


def test_a_suspended_job_ends_on_all_its_hosts_and_is_noted_once(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.kinds() == ["suspending", "suspended"]
    (text,) = scene.history("suspended")
    assert text.startswith("runs nowhere any more: s2, ")
    assert text.endswith("is in the memory of h2")
    assert sorted(scene.asked("EndEarlier")) == ["h0", "h1"], "each once"
    assert scene.owners() == {"a/0": ("h0", 3, False), "a/1": ("h1", 3, False)}
    assert not scene.asked("ThawCapsule")
    assert "open" not in scene.said
    assert "forget a" in scene.said


def test_a_person_who_suspends_a_job_is_named_in_its_history(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            ordered = scene.order()
            assert (ordered.job, ordered.holders) == ("a", {"a/0": "h2", "a/1": "h2"})
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    first = next(e for e in scene.fleet.journal.events("a", 0) if e.kind == "suspending")
    assert (first.text, first.by) == ("a last snapshot is taken, then it ends everywhere", "root")
    (row,) = scene.fleet.journal.snapshots.history("a")
    assert row.why == "root wants it"


def test_a_host_that_is_down_does_not_keep_a_job_from_being_suspended(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.job.state == "suspended")
            scene.cut("h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            scene.held.pop("EndEarlier").set()
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.fleet.journal.snapshots.before("a") == [], "h0 has ended its copy"


def test_a_job_waits_while_none_of_its_hosts_has_ended_its_copy(scene: SuspensionsScene) -> None:
    async def play() -> None:
        scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.job.state == "suspended")
            scene.cut("h0", "h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            scene.held.pop("EndEarlier").set()
            waits = "waits until one of h0, h1 has ended its copy: the job may train there"
            await scene.until(lambda: waits in scene.history("suspending"))
            await asyncio.sleep(0.3)
            assert not scene.history("suspended")
            assert scene.history("suspending").count(waits) == 1
            assert scene.fleet.journal.snapshots.before("a") == ["h0", "h1"]
            scene.alive.add("h1")
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.fleet.journal.snapshots.before("a") == []


def test_a_host_that_cannot_end_its_copy_is_noted_and_asked_again(scene: SuspensionsScene) -> None:
    async def play() -> None:
        scene.fails["EndEarlier h1"] = [Refused("h1 still works on a/1")] * 3
        async with scene.at_work():
            await scene.suspend()

    asyncio.run(play())
    left = "earlier copies are left on h1: h1 still works on a/1"
    assert scene.history("suspending").count(left) == 1
    assert scene.asked("EndEarlier").count("h1") == 4
    assert scene.asked("EndEarlier").count("h0") == 1


def test_a_restarted_orchestrator_goes_on_ending_copies(scene: SuspensionsScene) -> None:
    async def begins() -> None:
        scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.ended_on() == {"h0", "h1"})

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(begins())
    assert not scene.history("suspended")
    scene.held.clear()
    scene.said.clear()
    scene.restart()
    assert (scene.job.state, scene.job.rewinds) == ("suspended", 1)
    assert scene.job.newest is not None
    assert scene.job.newest.name == "s2"
    asyncio.run(goes_on())
    assert scene.ended_on() == {"h0", "h1"}
    assert scene.job.state == "suspended"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_suspended_job_that_is_stopped_ends(
    scene: SuspensionsScene, sent: signal.Signals
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            await scene.stopping.signal(scene.job, sent, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert scene.job.code == KILLED
    assert scene.history("ended") == [
        f"ended on {host} with code {KILLED}" for host in ("h0", "h1")
    ] + [f"ended with code {KILLED}"]
    again = Fleet(scene.fleet.cluster).jobs["a"]
    assert (again.state, again.code) == ("ended", KILLED)


def test_a_suspended_job_that_was_stopped_before_a_restart_ends_after_it(
    scene: SuspensionsScene,
) -> None:
    async def begins() -> None:
        async with scene.at_work():
            await scene.suspend()

    async def goes_on() -> None:
        async with scene.at_work():
            scene.stopping.resume()
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(begins())
    scene.fleet.journal.set_job("a", "ending", None)
    scene.restart()
    asyncio.run(goes_on())
    assert scene.job.code == KILLED


def test_a_suspended_job_can_be_stopped_while_no_host_of_it_is_up(scene: SuspensionsScene) -> None:
    async def play() -> None:
        scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: scene.job.state == "suspended")
            scene.cut("h0", "h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            scene.held.pop("EndEarlier").set()
            await scene.until(lambda: "waits until" in scene.history("suspending")[-1])
            await scene.stopping.signal(scene.job, signal.SIGTERM, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.job.code == KILLED


def test_a_full_disk_ends_no_loop_and_a_stopped_job_ends_once_there_is_room(
    scene: SuspensionsScene,
) -> None:
    """A loop that raises takes the whole orchestrator down."""

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
        work = asyncio.ensure_future(scene.suspensions.run())
        beats = asyncio.ensure_future(scene._beat())
        try:
            fill(scene.fleet.journal)
            await scene.stopping.signal(scene.job, signal.SIGTERM, "root")
            await asyncio.sleep(0.2)
            assert not work.done(), f"it has ended: {work.exception()}"
            empty(scene.fleet.journal)
            await scene.until(lambda: scene.job.state == "ended")
        finally:
            for each in (work, beats):
                each.cancel()
            await asyncio.gather(work, beats, return_exceptions=True)

    asyncio.run(play())
    assert scene.job.code == KILLED


def test_a_suspended_job_takes_no_slot_and_is_on_no_host(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert {view.name for view in scene.fleet.views() if view.used} == {"h0", "h1"}
            await scene.suspend()

    asyncio.run(play())
    assert [view.used for view in scene.fleet.views()] == [0, 0, 0]
    assert scene.fleet.living() == []
    assert not any(scene.fleet.held().values())
    shown = status(scene.fleet, lambda _job: True, sees_all=True)
    (job,) = shown.jobs
    assert job.state == "suspended"
    assert [(c.state, c.host, c.ranks) for c in job.capsules] == [("suspended", "", [])] * 2
    assert [host.capsules for host in shown.hosts] == [[], [], []]
    assert job.protection is not None
    assert (job.protection.newest, job.protection.holders) == ("s2", ["h2"])
    assert job.protection.why_not == ""


def test_status_says_that_the_holder_of_a_suspended_job_is_not_up(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))

    asyncio.run(play())
    (job,) = status(scene.fleet, lambda _job: True, sees_all=True).jobs
    assert job.protection is not None
    assert job.protection.why_not == "h2, which keeps s2, is not up"


@pytest.mark.parametrize("side", ["leaving", "coming"])
def test_a_copy_from_before_the_suspension_is_ruled_to_end(
    scene: SuspensionsScene, side: str
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()

    asyncio.run(play())
    for epoch in (1, 3):
        assert scene.claim("h0", "a/0", epoch, side) == "end"
        assert scene.claim("h1", "a/1", epoch, side) == "end"
    assert not any(granted for _, _, granted in scene.owners().values())


def test_the_holder_of_a_suspended_job_keeps_its_last_image_only(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()

    asyncio.run(play())
    rulings = [
        scene.parts.claims.rule("h2", Claim(f"s{n}.0", "a/0", "held", 1, ready=True)).ruling
        for n in (1, 2)
    ]
    assert rulings == ["end", "wait"]


def test_a_suspended_job_is_neither_protected_nor_rewound(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            assert not scene.rewinds.protected(scene.job)
            with pytest.raises(Refused, match="a cannot be taken back: it is suspended"):
                scene.rewinds.order("root", scene.job, "", dry_run=False)
            scene.cut("h0")
            began = time.monotonic()
            await until_async(lambda: time.monotonic() - began > 1.5)

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert scene.kinds() == ["suspending", "suspended"]
    assert scene.job.rewinds == 1


def test_a_rewind_that_looks_for_images_does_not_end_a_job_that_is_suspended_meanwhile(
    scene: SuspensionsScene,
) -> None:
    """The holders drop the snapshot before the last one, so its images are gone then."""

    async def play() -> None:
        asks = scene.held["GetHeld"] = asyncio.Event()
        writes = scene.held["CheckHeld"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "CheckHeld h2" in scene.said)
            scene.rewinds.order("root", scene.job, "", dry_run=False)
            await scene.until(lambda: "GetHeld h2" in scene.said)
            writes.set()
            await scene.until(lambda: scene.job.state == "suspended")
            scene.images = False
            asks.set()
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [None, None]
    assert scene.job.state == "suspended"


def test_a_job_that_is_suspended_already_is_not_suspended(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            with pytest.raises(Refused, match="a cannot be suspended: it is suspended"):
                scene.order()

    asyncio.run(play())
    assert scene.job.rewinds == 1


@pytest.mark.parametrize("state", ["rewinding", "ending", "ended"])
def test_only_a_job_that_runs_is_suspended(scene: SuspensionsScene, state: str) -> None:
    scene.job.state = state
    with pytest.raises(LiveshiftError, match=f"a cannot be suspended: it is {state}"):
        scene.order()
    assert not scene.history("suspending")


def test_what_a_capsule_wrote_that_had_gone_on_is_cut_back_at_once(
    scene: SuspensionsScene,
) -> None:
    """The orchestrator was silent after it had written the suspension. A resumption cuts nothing:
    by then other programs may have written to the file."""

    async def play() -> None:
        async with scene.at_work():
            scene.ran_on, scene.written = {"h1": ["a/1"]}, {b"/shared/log": 100}
            scene.held["CutBack"] = asyncio.Event()
            scene.order()
            await scene.until(lambda: bool(scene.asked("CutBack")))
            assert not scene.history("suspended"), "the job does not rest before that"
            scene.held["CutBack"].set()
            await scene.until(lambda: bool(scene.history("suspended")))
            scene.ran_on = {}
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert scene.asked("CutBack") == ["h0", "h0"], "that it was held was noted, too"
    (said,) = [text for text in scene.history("suspending") if "had gone on" in text]
    assert said.startswith("a/1 had gone on after s2, and a resumption repeats that; files on ")
    assert "/shared/log (by 2 kB)" in said


def test_without_that_no_file_is_cut(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.written = {b"/shared/log": 100}
            await scene.suspend()
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    assert not scene.asked("CutBack")


def test_it_is_tried_again_until_a_holder_says_what_was_written(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.ran_on, scene.written = {"h1": ["a/1"]}, {b"/shared/log": 100}
            scene.order()
            await scene.until(lambda: scene.job.state == "suspended")
            scene.fails["GetHeld"] = [Unreachable("h2 does not answer")] * 2
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.asked("CutBack") == ["h0"]
