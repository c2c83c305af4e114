# SPDX-License-Identifier: Apache-2.0
"""The snapshot with which a job is suspended: when it is ordered, taken, and given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fleet_scene import into_one_rack
from suspensions_scene import SuspensionsScene, scene

from liveshift.errors import LiveshiftError, Refused, StepFailed, Unreachable
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["scene"]

STEPS = ["Inspect", "Hold", "StartSnapshot", "LockCapsule", "DumpCapsule", "SealSnapshot"]


def a_move(scene: SuspensionsScene) -> HostMigration:
    """A move of a/1 that begins as moves do, and does nothing by itself."""
    order = Order(scene.job, scene.job.capsules["a/1"], "h2", "a test", "root")
    move = HostMigration(scene.parts.context, 3, order)
    if (snapshot := scene.fleet.snapshots.get("a")) is not None:
        snapshot.abandon(f"{move.name} of a/1 began", to_a_move=True)
    scene.fleet.migrations[move.name] = move
    return move


def end_move(scene: SuspensionsScene, move: HostMigration) -> None:
    move.step = MigrationStep.FAILED
    assert scene.fleet.moves_of(scene.job) == []


def not_started(scene: SuspensionsScene) -> None:
    scene.job.capsules["a/1"].started = False


def not_granted(scene: SuspensionsScene) -> None:
    scene.job.capsules["a/1"].granted = False


def one_ended(scene: SuspensionsScene) -> None:
    scene.job.capsules["a/1"].code = 0


def one_down(scene: SuspensionsScene) -> None:
    scene.fleet.hosts["h1"].heard = 0.0


def no_holder(scene: SuspensionsScene) -> None:
    into_one_rack(scene.fleet, "h0", "h1")
    scene.fleet.hosts["h2"].heard = 0.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (not_started, "a/1 does not run yet"),
        (not_granted, "a/1 does not run yet"),
        (one_ended, "a/1 has ended"),
        (one_down, "h1, which runs a/1, is not up"),
        (no_holder, "no host can hold its snapshots: h0 runs a capsule of the job "),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_job_that_cannot_be_suspended_now_is_refused_with_the_reason(
    scene: SuspensionsScene, change: Callable[[SuspensionsScene], None], why: str, dry_run: bool
) -> None:
    change(scene)
    with pytest.raises(Refused) as refused:
        scene.suspensions.suspend("root", scene.job, dry_run=dry_run)
    assert refused.value.message.startswith(f"a cannot be suspended: {why}")
    assert "liveshift" in (refused.value.hint or "")
    assert scene.kinds() == []


def test_an_order_waits_for_a_snapshot_that_is_under_way(scene: SuspensionsScene) -> None:
    async def play() -> None:
        scene.ask(snapshot_every=0.001)
        closes = scene.held["CloseSnapshot"] = asyncio.Event()
        async with scene.at_work():
            await scene.until(lambda: "CloseSnapshot h0" in scene.said)
            scene.order()
            await asyncio.sleep(0.1)
            assert not scene.asked("SealSnapshot")
            scene.held.clear()
            closes.set()
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.job.newest is not None
    assert scene.job.newest.name == "s3", "the one before it was completed"
    assert sorted(scene.asked("SealSnapshot")) == ["h0", "h1"]
    assert scene.fleet.snapshots == {}
    assert scene.job.taking == 0


def test_a_job_whose_snapshots_are_off_can_be_suspended(scene: SuspensionsScene) -> None:
    async def play() -> None:
        scene.ask(snapshot_every=-1.0)
        async with scene.at_work():
            await scene.until(lambda: scene.job.newest is None)
            await scene.suspend()
            await asyncio.sleep(0.1)
            assert scene.job.newest is not None, "it is all that there is of the job"
            assert scene.fleet.journal.snapshots.newest("a") == scene.job.newest
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))
            await scene.until(lambda: scene.job.newest is None)

    asyncio.run(play())
    assert scene.job.state == "running"


@pytest.mark.parametrize("step", [*STEPS, "CheckHeld"])
def test_a_step_that_fails_is_noted_and_the_job_goes_on(scene: SuspensionsScene, step: str) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.fails[step] = [StepFailed("snapshot", "it could not")] * 2
            scene.order()
            await scene.until(lambda: bool(scene.history("not suspended")))
            await asyncio.sleep(0.2)

    asyncio.run(play())
    (text,) = scene.history("not suspended")
    assert text.startswith("the job goes on: ")
    assert "it could not" in text
    assert (scene.job.state, scene.job.rewinds) == ("running", 0)
    assert scene.kinds() == ["suspending", "not suspended"], "there is one attempt"
    assert scene.job.newest is not None
    assert scene.job.newest.name == "s1"
    assert scene.job.taking == 0
    assert scene.fleet.snapshots == {}
    assert scene.fleet.journal.snapshots.snapshots_under_way() == []
    begun = step not in ("Inspect", "Hold")
    assert bool(scene.asked("ThawCapsule")) is begun
    closed = "close" in scene.said
    assert ("open" in scene.said) is closed
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_a_write_that_fails_is_noted_and_the_job_goes_on(
    scene: SuspensionsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise LiveshiftError("the disk is full")

    async def play() -> None:
        monkeypatch.setattr(scene.fleet.journal.snapshots, "suspend", full)
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: bool(scene.history("not suspended")))

    asyncio.run(play())
    assert scene.history("not suspended") == ["the job goes on: the disk is full"]
    assert scene.job.state == "running"
    assert sorted(scene.asked("ThawCapsule")) == ["h0", "h1"]
    assert "open" in scene.said


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_order_waits_for_the_end_of_a_move(scene: SuspensionsScene, dry_run: bool) -> None:
    async def play() -> None:
        move = a_move(scene)
        async with scene.at_work():
            ordered = scene.suspensions.suspend("root", scene.job, dry_run=dry_run)
            assert (ordered.holders, ordered.waits_for) == ({}, ["m3"])
            await asyncio.sleep(0.1)
            assert not scene.asked("SealSnapshot")
            assert scene.job.state == "running"
            if dry_run:
                assert scene.kinds() == []
                return
            (text,) = scene.history("suspending")
            assert text.startswith("waits for the end of m3; then a last snapshot is taken")
            end_move(scene, move)
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.job.state == ("running" if dry_run else "suspended")
    assert not scene.history("not suspended")
    assert len(scene.asked("SealSnapshot")) == (0 if dry_run else 2), "once, and no more"


def test_a_job_of_which_a_part_has_ended_waits_for_no_move(scene: SuspensionsScene) -> None:
    a_move(scene)
    one_ended(scene)
    with pytest.raises(Refused, match="a cannot be suspended: a/1 has ended"):
        scene.order()


@pytest.mark.parametrize("step", ["Inspect", "StartSnapshot", "CheckHeld"])
def test_a_move_that_begins_before_the_write_goes_first(scene: SuspensionsScene, step: str) -> None:
    """The suspension is tried again after its end, and the person sees why it waits."""

    async def play() -> None:
        held = scene.held[step] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: bool(scene.asked(step)))
            move = a_move(scene)
            held.set()
            scene.held.clear()
            await scene.until(lambda: len(scene.history("suspending")) == 2)
            with pytest.raises(Refused, match="an ordered snapshot of it is under way already"):
                scene.order()
            assert scene.job.state == "running"
            end_move(scene, move)
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.history("suspending")[1].endswith("it is tried again after the end of m3")
    assert "m3" in scene.history("suspending")[1].partition(";")[0]
    assert scene.kinds() == ["suspending", "suspended"]
    assert scene.job.state == "suspended"


def test_what_is_wrong_after_the_move_ends_the_order(scene: SuspensionsScene) -> None:
    into_one_rack(scene.fleet, "h0", "h1")

    async def play() -> None:
        move = a_move(scene)
        async with scene.at_work():
            scene.order()
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            end_move(scene, move)
            await scene.until(lambda: bool(scene.history("not suspended")))

    asyncio.run(play())
    (text,) = scene.history("not suspended")
    assert text.startswith("the job goes on: no host can hold its snapshots: ")


def test_a_job_that_is_stopped_while_its_order_waits_ends(scene: SuspensionsScene) -> None:
    async def play() -> None:
        move = a_move(scene)
        async with scene.at_work():
            scene.order()
            await scene.stopping.signal(scene.job, 15, "root")
            for capsule in scene.job.capsules.values():
                scene.endings.capsule_ended(scene.job, capsule, 143)
            end_move(scene, move)
            await scene.until(lambda: bool(scene.history("not suspended")))

    asyncio.run(play())
    assert scene.history("not suspended") == ["the job has ended"]
    assert (scene.job.state, scene.job.code) == ("ended", 143)


def test_an_order_that_waits_can_be_taken_back_by_whom_it_is_from(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        move = a_move(scene)
        async with scene.at_work():
            assert not scene.ordered.withdraw("root", scene.job), "there is none"
            scene.order()
            assert not scene.ordered.withdraw("alice", scene.job)
            assert scene.ordered.withdraw("root", scene.job)
            end_move(scene, move)
            await asyncio.sleep(0.1)
            assert scene.job.state == "running"
            held = scene.held["SealSnapshot"] = asyncio.Event()
            scene.order()
            await scene.until(lambda: bool(scene.asked("SealSnapshot")))
            assert not scene.ordered.withdraw("root", scene.job), "its snapshot has begun"
            held.set()
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    assert scene.history("not suspended") == ["the job goes on: root took the order back"]


def test_a_restarted_orchestrator_says_that_an_order_that_waited_is_void(
    scene: SuspensionsScene,
) -> None:
    """Else `liveshift suspend` would wait without end; and no job is suspended by surprise."""

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("not suspended")))
            await asyncio.sleep(0.2)

    a_move(scene)
    scene.order()
    for _ in range(2):
        scene.restart()
        asyncio.run(goes_on())
    assert scene.history("not suspended") == ["the job goes on: the orchestrator was restarted"]
    assert scene.job.state == "running"


def test_what_hinders_a_last_snapshot_by_its_time_is_noted(scene: SuspensionsScene) -> None:
    into_one_rack(scene.fleet, "h0", "h1")

    async def play() -> None:
        scene.ask(snapshot_every=0.001)
        closes = scene.held["CloseSnapshot"] = asyncio.Event()
        async with scene.at_work():
            await scene.until(lambda: "CloseSnapshot h0" in scene.said)
            scene.order()
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            scene.held.clear()
            closes.set()
            await scene.until(lambda: bool(scene.history("not suspended")))

    asyncio.run(play())
    (text,) = scene.history("not suspended")
    assert text.startswith("the job goes on: no host can hold its snapshots: ")
    assert scene.job.state == "running"


def test_a_full_disk_ends_no_loop_and_the_job_goes_on(
    scene: SuspensionsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that raises takes the whole orchestrator down."""

    def full(*_: object) -> None:
        raise JournalError("the disk is full")

    async def play() -> None:
        monkeypatch.setattr(scene.fleet.journal.snapshots, "begin_snapshot", full)
        work = asyncio.ensure_future(scene.ordered.run())
        try:
            scene.order()
            await asyncio.sleep(0.2)
            assert not work.done(), f"it has ended: {work.exception()}"
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.history("not suspended") == ["the job goes on: the disk is full"]


@pytest.mark.parametrize("step", ["StartSnapshot", "DumpCapsule"])
def test_a_job_that_is_taken_back_meanwhile_is_noted_as_not_suspended(
    scene: SuspensionsScene, step: str
) -> None:
    """`liveshift suspend` waits for "suspended", "not suspended" or "ended"."""

    async def play() -> None:
        scene.held[f"{step} h1"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: f"{step} h1" in scene.said)
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewound")))
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.history("not suspended")


def test_a_job_that_is_stopped_meanwhile_ends(scene: SuspensionsScene) -> None:
    async def play() -> None:
        writes = scene.held["CheckHeld"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "CheckHeld h2" in scene.said)
            await scene.stopping.signal(scene.job, 15, "root")
            writes.set()
            await scene.until(lambda: bool(scene.asked("ThawCapsule")))
            for capsule in scene.job.capsules.values():
                scene.endings.capsule_ended(scene.job, capsule, 143)
            await asyncio.sleep(0.1)

    asyncio.run(play())
    assert (scene.job.state, scene.job.code) == ("ended", 143)
    assert not scene.history("suspended")


def test_a_later_job_of_the_same_name_is_not_suspended(scene: SuspensionsScene) -> None:
    """The order was for one that has ended before its last snapshot."""

    async def play() -> None:
        scene.ask(snapshot_every=0.001)
        closes = scene.held["CloseSnapshot"] = asyncio.Event()
        async with scene.at_work():
            await scene.until(lambda: "CloseSnapshot h0" in scene.said)
            scene.order()
            old = scene.job
            old.state = "ended"
            closes.set()
            scene.held.clear()
            await scene.until(lambda: not scene.fleet.snapshots)
            request, capsules = old.request, dict(old.capsules)
            scene.fleet.jobs["a"] = Job("a", old.overlay, request, 0, 1.0, capsules)
            await asyncio.sleep(0.3)

    asyncio.run(play())
    assert scene.job.state == "running"
    assert not scene.asked("SealSnapshot")


def test_a_restarted_orchestrator_lets_the_job_go_on_and_says_so(scene: SuspensionsScene) -> None:
    """`liveshift suspend` goes on waiting over a restart, and must learn how it ended."""

    async def begins() -> None:
        scene.held["SealSnapshot"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "SealSnapshot h0" in scene.said)

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: "open" in scene.said)
            await scene.until(lambda: not scene.fleet.snapshots)
            await asyncio.sleep(0.3)

    asyncio.run(begins())
    scene.held.clear()
    scene.restart()
    scene.said.clear()
    asyncio.run(goes_on())
    assert (scene.job.state, scene.job.rewinds) == ("running", 0)
    assert set(scene.asked("ThawCapsule")) == {"h0", "h1"}
    assert scene.fleet.journal.snapshots.snapshots_under_way() == []
    assert scene.history("not suspended")


def test_a_source_that_does_not_answer_fails_the_suspension(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.fails["SealSnapshot h1"] = [Unreachable("h1 did not answer")]
            scene.order()
            await scene.until(lambda: bool(scene.history("not suspended")))
            scene.fails.clear()
            await scene.suspend()

    asyncio.run(play())
    assert scene.kinds() == ["suspending", "not suspended", "suspending", "suspended"]
