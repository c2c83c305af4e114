# SPDX-License-Identifier: Apache-2.0
"""A job that has ended here goes on from a directory, in the place of the ended one."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from saved_scene import DISK, SavedScene, saving

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.snapshot import saved_snapshot

__all__ = ["saving"]


def saved_and_ended(scene: SavedScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.save()
            scene.end_job()

    asyncio.run(play())


def test_a_job_that_has_ended_goes_on_under_later_epochs_and_counts(saving: SavedScene) -> None:
    """A host that missed its end must not take its copies for newer ones."""
    scene = saving
    scene.fleet.journal.file.write("INSERT OR REPLACE INTO rewound VALUES ('a', 5)")
    scene.job.rewinds = 5
    saved_and_ended(scene)
    epochs = max(capsule.epoch for capsule in scene.job.capsules.values())

    async def play() -> None:
        async with scene.at_work():
            await scene.adopt()
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())
    assert scene.job.rewinds == 7
    assert min(capsule.epoch for capsule in scene.job.capsules.values()) > epochs
    kinds = scene.kinds()
    assert kinds[:2] == ["saving", "saved"], "what was before is still there"
    assert "resumed" in kinds
    assert all(load.rewinds == 6 for _, load in scene.loaded)
    assert scene.asked("Forget")


def test_of_two_requests_one_adopts_the_job(saving: SavedScene) -> None:
    scene = saving
    saved_and_ended(scene)

    async def play() -> None:
        async with scene.at_work():
            done = await asyncio.gather(scene.adopt(), scene.adopt(), return_exceptions=True)
            errors = [one for one in done if isinstance(one, BaseException)]
            assert len(errors) == 1
            assert isinstance(errors[0], LiveshiftError)
            assert "cannot be resumed" in str(errors[0])
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())
    assert scene.history("adopted") != []
    assert len(scene.history("adopted")) == 1


def test_a_job_that_takes_its_place_meanwhile_wins(saving: SavedScene) -> None:
    scene = saving
    saved_and_ended(scene)
    ended = scene.job

    async def play() -> None:
        async with ended.forgetting:  # another request forgets it
            work = asyncio.ensure_future(scene.adopt())
            await scene.until(lambda: bool(ended.forgetting._waiters))
            capsules = {"a/0": Capsule("a/0", 0, "h0", 9)}
            run = messages.RunJob("a", 1, ["true"], {}, "/", 0, [])
            scene.fleet.jobs["a"] = Job("a", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
        with pytest.raises(Refused, match="a, which is running, has the name"):
            await work

    asyncio.run(play())
    assert scene.job.capsules.keys() == {"a/0"}
    assert not scene.history("adopted")
    assert not scene.asked("Forget")


@pytest.mark.parametrize("failing", ["begin_snapshot", "suspend", "complete_snapshot"])
def test_a_write_that_fails_leaves_the_ended_job(
    saving: SavedScene, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """With its output, which its hosts have."""
    scene = saving
    saved_and_ended(scene)
    before, ended, asked = scene.journal(), scene.job, len(scene.asks)

    def full(*_: object, **__: object) -> None:
        raise JournalError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(scene.fleet.journal.snapshots, failing, full)
        with pytest.raises(JournalError):
            asyncio.run(scene.adopt())
    assert scene.job is ended
    assert ended.state == "ended"
    assert scene.journal() == before
    assert {type(message) for _, message in scene.asks[asked:]} == {messages.ReadManifest}

    async def play() -> None:
        async with scene.at_work():
            await scene.adopt()
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())


def test_nobody_resumes_it_before_hosts_have_removed_what_the_ended_job_has_left(
    saving: SavedScene,
) -> None:
    scene = saving
    saved_and_ended(scene)

    async def play() -> None:
        async with scene.at_work():
            scene.held["Forget"] = asyncio.Event()
            work = asyncio.ensure_future(scene.adopt())
            await scene.until(lambda: bool(scene.asked("Forget")))
            assert scene.job.state == "suspended"
            with pytest.raises(Refused, match="hosts still remove what the ended job has left"):
                await scene.suspensions.resume("root", scene.job, dry_run=False)
            await asyncio.sleep(0.3)
            assert not scene.loaded
            assert not scene.asked("EndEarlier")
            assert not scene.asked("Locate")
            scene.held.pop("Forget").set()
            await work
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())


def test_an_orchestrator_that_dies_while_hosts_forget_the_ended_job_has_the_adopted_one(
    saving: SavedScene,
) -> None:
    scene = saving
    saved_and_ended(scene)

    async def dies() -> None:
        scene.held["Forget"] = asyncio.Event()
        work = asyncio.ensure_future(scene.adopt())
        await scene.until(lambda: bool(scene.asked("Forget")))
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def resumes() -> None:
        scene.held.pop("Forget").set()
        async with scene.at_work():
            await scene.suspensions.resume("root", scene.job, dry_run=False)
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(dies())
    scene.restart()
    assert scene.job.state == "suspended"
    asyncio.run(resumes())


def test_an_image_that_cannot_be_loaded_leaves_the_job_suspended(saving: SavedScene) -> None:
    scene = saving
    saved_and_ended(scene)

    async def play() -> None:
        scene.fails["LoadHeld a/1"] = [StepFailed("restore", "memory.zst is damaged")]
        async with scene.at_work():
            await scene.adopt()
            await scene.until(lambda: bool(scene.history("not resumed")))
            assert scene.job.state == "suspended"
            assert scene.job.taking == 0
            with pytest.raises(Refused, match="it is suspended at s2, not at s1") as no:
                await scene.suspensions.resume(
                    "root", scene.job, source=DISK, snapshot="s1", dry_run=False
                )
            assert "`liveshift stop a`" in (no.value.hint or "")
            await scene.suspensions.resume("root", scene.job, dry_run=False)
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())
    assert scene.history("not resumed") == ["stays suspended: restore: memory.zst is damaged"]


def test_a_suspended_job_goes_on_from_another_directory_with_the_same_snapshot_only(
    saving: SavedScene,
) -> None:
    scene = saving

    async def play() -> None:
        async with scene.at_work():
            scene.suspensions.suspend("root", scene.job, to=DISK, dry_run=False)
            await scene.until(lambda: f"is in {DISK}" in " ".join(scene.history("suspended")))
            saved = scene.on_disk()
            moved = saved_snapshot.encode(saved, scene.signatures)
            scene.disk["/moved", "a", saved.snapshot] = moved
            other = msgspec.structs.replace(saved, time=saved.time - 5)
            wrong = saved_snapshot.encode(other, scene.signatures)
            scene.disk["/wrong", "a", saved.snapshot] = wrong
            resume = scene.suspensions.resume
            with pytest.raises(Refused, match="is not the snapshot at which a is suspended"):
                await resume("root", scene.job, source="/wrong", dry_run=False)
            with pytest.raises(NotFound, match="/nowhere has no snapshot of a"):
                await resume("root", scene.job, source="/nowhere", dry_run=False)
            assert (scene.job.state, scene.loaded) == ("suspended", [])
            await resume("root", scene.job, source="/moved", snapshot=saved.snapshot, dry_run=False)
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())
    assert {load.directory for _, load in scene.loaded} == {"/moved"}
