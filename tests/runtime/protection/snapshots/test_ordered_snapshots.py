# SPDX-License-Identifier: Apache-2.0
"""A snapshot that a person orders is saved in a directory while the job trains on; what came of
each order is in the history, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fleet_scene import into_one_rack
from saved_scene import DISK, SavedScene, saving

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.model.ownership import Ruling

__all__ = ["saving"]


def order(scene: SavedScene, *, dry_run: bool = False) -> messages.SnapshotOrdered:
    return scene.ordered.save("root", scene.job, DISK, dry_run=dry_run)


def test_a_job_is_saved_and_trains_on(saving: SavedScene) -> None:
    scene = saving

    async def play() -> None:
        async with scene.at_work():
            saved = await scene.save()
            assert scene.job.newest is not None
            assert (saved.job, saved.snapshot) == ("a", scene.job.newest.name)
            assert saved.time == scene.job.newest.time
            digests = {name: capsule.digest for name, capsule in saved.capsules.items()}
            assert digests == {f"a/{n}": f"digest of s2.{n}" for n in range(2)}

    asyncio.run(play())
    assert (scene.job.state, scene.job.rewinds) == ("running", 0)
    assert scene.kinds() == ["saving", "saved"]
    assert scene.history("saved")[0].startswith(f"s2 is in {DISK}: ")
    kinds = [line.split()[0] for line in scene.said]
    assert kinds.index("WriteManifest") > max(n for n, k in enumerate(kinds) if k == "SaveHeld")
    assert scene.asked("WriteManifest") == ["h2"]
    assert (scene.saved.busy, scene.fleet.snapshots, scene.job.taking) == ({}, {}, 0)


def test_a_dry_run_only_names_the_holders(saving: SavedScene) -> None:
    before = saving.journal()
    assert order(saving, dry_run=True).holders == {"a/0": "h2", "a/1": "h2"}
    assert saving.journal() == before
    assert not saving.snapshots.ordered


def test_without_another_host_the_jobs_own_hosts_hold_what_is_saved(saving: SavedScene) -> None:
    for host in saving.fleet.hosts.values():
        host.heard = float("inf")
    saving.fleet.hosts["h2"].heard = 0.0
    assert order(saving, dry_run=True).holders == {"a/0": "h1", "a/1": "h0"}
    into_one_rack(saving.fleet, "h0", "h1")
    assert order(saving, dry_run=True).holders == {"a/0": "h0", "a/1": "h1"}


def saved_without_h2(scene: SavedScene) -> None:
    """Save the job while only its own hosts are there to hold it."""

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            scene.fleet.hosts["h2"].heard = 0.0  # it has been away for long
            await scene.save()

    asyncio.run(play())


@pytest.mark.parametrize("error", [NotFound("it is damaged"), Unreachable("h1 is gone")])
def test_if_one_holder_cannot_save_an_image_the_other_one_does(
    saving: SavedScene, error: LiveshiftError
) -> None:
    saving.fails["SaveHeld h1"] = [error]
    saved_without_h2(saving)
    asked = [(h, m.capsule) for h, m in saving.asks if isinstance(m, messages.SaveHeld)]
    assert asked == [("h1", "a/0"), ("h0", "a/1"), ("h0", "a/0"), ("h1", "a/1")]
    assert saving.job.newest is not None


def test_what_lay_on_the_only_host_alone_is_dropped_once_it_is_saved(saving: SavedScene) -> None:
    """No later snapshot would take its place."""
    into_one_rack(saving.fleet, "h0", "h1")
    saved_without_h2(saving)
    assert saving.job.newest is None
    assert saving.fleet.journal.snapshots.newest("a") is None
    assert saving.fleet.journal.snapshots.saved("a") is not None


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("why", ["is tainted or cordoned", "is not up"])
def test_an_order_takes_the_place_of_no_better_snapshot(
    saving: SavedScene, monkeypatch: pytest.MonkeyPatch, lost: bool, why: str
) -> None:
    """h2 keeps one, and is cordoned or has just been restarted. If it has lost the images, there is
    nothing to be dropped."""
    scene = saving
    into_one_rack(scene.fleet, "h0", "h1")

    async def play() -> None:
        async with scene.at_work():
            await scene.save()
            if why == "is not up":
                monkeypatch.setattr(scene.fleet, "is_up", lambda host: host != "h2")
            else:
                scene.fleet.cordons["h2"] = "root"
            if lost:
                scene.fleet.hosts["h2"].lost = frozenset({"s2.0", "s2.1"})
                await scene.save()
                return
            for dry_run in (True, False):
                with pytest.raises(Refused) as refused:
                    order(scene, dry_run=dry_run)
                assert f"h2 {why}" in refused.value.message
                assert "have to drop s2, which protects the job" in refused.value.message
            assert scene.job.newest is not None
            assert scene.job.newest.holders == {"a/0": ["h2"], "a/1": ["h2"]}
            dry = scene.ordered.suspend("root", scene.job, DISK, dry_run=True)
            assert dry.holders == {"a/0": "h0", "a/1": "h1"}, "a suspended job does not go back"

    asyncio.run(play())


def suspended(scene: SavedScene) -> None:
    scene.job.state = "suspended"


def ending(scene: SavedScene) -> None:
    scene.job.state = "ending"


def one_ended(scene: SavedScene) -> None:
    scene.job.capsules["a/1"].code = 0


@pytest.mark.parametrize(
    ("change", "why", "hint"),
    [
        (suspended, "it is suspended", f"`liveshift suspend a --to {DISK}`"),
        (ending, "it is ending", "`liveshift status a -o wide`"),
        (one_ended, "a/1 has ended", "liveshift status"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_saved_now_is_refused(
    saving: SavedScene, change: Callable[[SavedScene], None], why: str, hint: str, dry_run: bool
) -> None:
    change(saving)
    with pytest.raises(Refused) as refused:
        order(saving, dry_run=dry_run)
    assert refused.value.message.startswith(f"a cannot be saved: {why}")
    assert hint in (refused.value.hint or "")
    assert not saving.snapshots.ordered


def order_beside_a_snapshot(scene: SavedScene) -> None:
    """Order one while a snapshot is under way, which goes on a little later, and wait for both."""

    async def play() -> None:
        scene.ask(snapshot_every=0.001)
        closes = scene.held["CloseSnapshot"] = asyncio.Event()
        async with scene.at_work():
            await scene.until(lambda: "CloseSnapshot h0" in scene.said)
            order(scene)
            await asyncio.sleep(0.05)
            assert not scene.asked("SaveHeld")
            scene.held.clear()
            closes.set()
            await scene.until(lambda: bool(scene.history("saved")))

    asyncio.run(play())


def test_an_order_waits_for_a_snapshot_that_is_under_way(saving: SavedScene) -> None:
    order_beside_a_snapshot(saving)
    assert saving.on_disk().snapshot == "s3", "the one before it was completed"


def test_sources_know_which_snapshot_was_ordered(saving: SavedScene) -> None:
    """It does not fail because a holder is silent for a moment."""
    scene = saving
    order_beside_a_snapshot(scene)
    starts = [m for _, m in scene.asks if isinstance(m, messages.StartSnapshot)]
    ordered = {(m.image.partition(".")[0], m.ordered) for m in starts}
    assert {("s2", False), ("s3", True)} <= ordered


def test_a_snapshot_that_a_move_has_ended_is_taken_again(saving: SavedScene) -> None:
    scene = saving

    async def play() -> None:
        held = scene.held["Inspect"] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: bool(scene.asked("Inspect")))
            scene.fleet.snapshots["a"].abandon("m3 of a/1 began", to_a_move=True)
            scene.held.clear()
            held.set()
            await scene.until(lambda: bool(scene.history("saved")))

    asyncio.run(play())
    assert scene.history("saving")[1] == (
        "given up: m3 of a/1 began; it is tried again after the end of the move"
    )
    assert scene.kinds() == ["saving", "saved"]
    assert scene.on_disk().snapshot == "s3"


@pytest.mark.parametrize("at", ["Inspect", "SaveHeld h2", "WriteManifest"])
def test_there_is_one_order_at_a_time(saving: SavedScene, at: str) -> None:
    scene = saving

    async def play() -> None:
        held = scene.held[at] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            for _ in range(2):  # it waits, or is under way
                with pytest.raises(Refused, match="an ordered snapshot of it is under way already"):
                    order(scene)
                with pytest.raises(Refused, match="an ordered snapshot of it is under way already"):
                    scene.order()
                await scene.until(lambda: bool(scene.asked(at.split()[0])))
            scene.held.clear()
            held.set()
            await scene.until(lambda: bool(scene.history("saved")))
            order(scene)
            await scene.until(lambda: len(scene.history("saved")) == 2)

    asyncio.run(play())
    assert [key[2] for key in scene.disk] == ["s2", "s3"]


def test_while_it_is_saved_no_other_one_is_taken_and_its_holders_keep_it(
    saving: SavedScene,
) -> None:
    scene = saving

    async def play() -> None:
        held = scene.held["SaveHeld"] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: len(scene.asked("SaveHeld")) == 2)
            newest = scene.job.newest
            assert newest is not None
            for every in (0.001, -1.0):  # one would be due, and: snapshots are off
                scene.ask(snapshot_every=every)
                await asyncio.sleep(0.1)
                assert scene.job.newest is newest
                claim = messages.Claim("s2.0", "a/0", "held", 1, ready=False, rewinds=0)
                assert scene.parts.claims.rule("h2", claim).ruling == Ruling.WAIT.value
            assert scene.fleet.snapshots == {}
            held.set()
            await scene.until(lambda: bool(scene.history("saved")))
            await scene.until(lambda: scene.job.newest is None)  # as they are off

    asyncio.run(play())


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("DumpCapsule", StepFailed("snapshot", "it could not")),
        ("SaveHeld a/0", Refused("it could not: the disk is full")),
        ("SaveHeld a/1", Unreachable("it could not answer")),
        ("WriteManifest", StepFailed("hold", "it could not")),
        ("SaveHeld a/0", ValueError("it could not: an internal error")),
    ],
)
def test_what_fails_is_noted_and_the_job_trains_on(
    saving: SavedScene, step: str, error: Exception
) -> None:
    scene = saving

    async def play() -> None:
        scene.fails[step] = [error] * 2
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: bool(scene.history("not saved")))
            assert not scene.history("saved")
            left = 0 if step == "DumpCapsule" else 2
            assert len(scene.asked("DropSaved")) == left, "nothing is left in the directory"
            scene.fails.clear()
            await scene.save()

    asyncio.run(play())
    (text,) = scene.history("not saved")
    assert text.startswith("the job goes on: ")
    assert "it could not" in text
    assert [key[2] for key in scene.disk] == ["s3"]
    assert (scene.job.state, scene.saved.busy) == ("running", {})


def test_the_first_error_counts_once_all_holders_have_answered(saving: SavedScene) -> None:
    """Else the next order would meet one that still writes."""
    scene = saving

    async def play() -> None:
        scene.fails["SaveHeld a/0"] = [Refused("no room")]
        held = scene.held["SaveHeld a/1"] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: len(scene.asked("SaveHeld")) == 2)
            await asyncio.sleep(0.1)
            assert not scene.history("not saved")
            held.set()
            await scene.until(lambda: bool(scene.history("not saved")))

    asyncio.run(play())
    assert scene.history("not saved") == ["the job goes on: no room"]
    assert not scene.asked("WriteManifest")


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_order_for_a_job_that_ends_is_noted(saving: SavedScene, forgotten: bool) -> None:
    """`liveshift snapshot` waits for "saved" or "not saved"."""
    scene = saving

    async def play() -> None:
        job = scene.job
        order(scene)
        scene.end_job()
        if forgotten:
            del scene.fleet.jobs["a"]
        work = asyncio.ensure_future(scene.ordered.run())
        await scene.until(lambda: bool(scene.history("not saved")))
        work.cancel()
        assert job.state == "ended"

    asyncio.run(play())
    assert scene.history("not saved") == ["the job has ended"]
    assert not scene.snapshots.ordered


def test_a_job_that_ends_while_it_is_saved_is_saved_or_not_in_words(saving: SavedScene) -> None:
    scene = saving

    async def play() -> None:
        held = scene.held["SaveHeld a/1"] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: len(scene.asked("SaveHeld")) == 2)
            scene.end_job()
            scene.fails["SaveHeld a/1"] = [LiveshiftError("h2 does not hold the image (any more)")]
            scene.held.clear()
            held.set()
            await scene.until(lambda: bool(scene.history("not saved")))

    asyncio.run(play())
    assert scene.history("not saved") == ["h2 does not hold the image (any more)"]
    assert not scene.disk


@pytest.mark.parametrize("at", ["Inspect", "SaveHeld", "WriteManifest"])
@pytest.mark.parametrize("state", ["running", "rewinding", "ended"])
def test_a_restarted_orchestrator_says_that_an_order_is_void(
    saving: SavedScene, at: str, state: str
) -> None:
    scene = saving

    async def begins() -> None:
        scene.held[at] = asyncio.Event()
        async with scene.at_work():
            order(scene)
            await scene.until(lambda: bool(scene.asked(at)))

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("not saved")))
            if state == "running":
                await scene.save()

    asyncio.run(begins())
    scene.held.clear()
    if state != "running":
        scene.fleet.journal.set_job("a", state, 0 if state == "ended" else None)
    scene.restart()
    asyncio.run(goes_on())
    goes = "" if state == "ended" else "the job goes on: "
    assert scene.history("not saved") == [f"{goes}the orchestrator was restarted"]


def test_a_restarted_orchestrator_voids_no_order_of_its_own(saving: SavedScene) -> None:
    async def play() -> None:
        async with saving.at_work():
            await saving.save()
        saving.restart()
        async with saving.at_work():
            await saving.save()

    asyncio.run(play())
    assert not saving.history("not saved")


def test_a_suspension_into_a_directory_outlives_the_orchestrator(saving: SavedScene) -> None:
    """Else a person who has ordered it switches all machines off, and the job is gone."""
    scene = saving

    async def begins() -> None:
        scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.suspensions.suspend("root", scene.job, to=DISK, dry_run=False)
            await scene.until(lambda: scene.job.state == "suspended")

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("suspended")))
            await asyncio.sleep(0.1)

    asyncio.run(begins())
    scene.held.clear()
    for _ in range(2):  # and once is enough
        scene.restart()
        asyncio.run(goes_on())
    assert [key[2] for key in scene.disk] == ["s2"]
    assert f"is in {DISK}" in scene.history("suspended")[0]
    assert scene.job.newest is not None
    assert (scene.job.newest.directory, scene.job.newest.holders) == (DISK, {})
