# SPDX-License-Identifier: Apache-2.0
"""A job that is suspended already is saved in a directory: nobody hears that it is there before it
is, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import signal

import pytest
from saved_scene import DISK, SavedScene, saving

from liveshift.errors import Refused, StepFailed
from liveshift.runtime.journal.journal_file import JournalError

__all__ = ["saving"]


def save(scene: SavedScene) -> None:
    scene.suspensions.suspend("root", scene.job, to=DISK, dry_run=False)


def where(scene: SavedScene) -> tuple[str, dict[str, list[str]]]:
    assert scene.job.newest is not None
    return scene.job.newest.directory, scene.job.newest.holders


def test_an_order_for_a_job_that_is_suspended_outlives_the_orchestrator(saving: SavedScene) -> None:
    """The person who has ordered it switches all machines off once the command says so."""
    scene = saving

    async def begins() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.held["SaveHeld"] = asyncio.Event()
            save(scene)
            await scene.until(lambda: bool(scene.asked("SaveHeld")))

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: len(scene.history("suspended")) > 1)

    asyncio.run(begins())
    assert [text[-9:] for text in scene.history("suspended")] == ["ory of h2"]
    scene.held.clear()
    scene.restart()
    asyncio.run(goes_on())
    assert [key[2] for key in scene.disk] == ["s2"]
    assert f"is in {DISK}" in scene.history("suspended")[1]
    assert not scene.history("not saved")
    assert where(scene) == (DISK, {})


def test_an_order_that_cannot_be_written_is_refused(
    saving: SavedScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = saving

    def full(*_: object) -> None:
        raise JournalError("no space is left")

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            with monkeypatch.context() as patch:
                patch.setattr(scene.fleet.journal.snapshots, "save_to", full)
                with pytest.raises(JournalError):
                    save(scene)
            await asyncio.sleep(0.2)
            assert not scene.asked("SaveHeld")
            save(scene)
            await scene.until(lambda: len(scene.history("suspended")) > 1)

    asyncio.run(play())
    assert where(scene) == (DISK, {})


def test_an_order_before_the_copies_have_ended_has_its_own_end(saving: SavedScene) -> None:
    """The end of the copies must not be taken for it."""
    scene = saving

    async def play() -> None:
        ends = scene.held["EndEarlier"] = asyncio.Event()
        saves = scene.held["SaveHeld"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "EndEarlier" in " ".join(scene.said))
            save(scene)
            scene.held.pop("EndEarlier")
            ends.set()
            await scene.until(lambda: not scene.suspensions._busy)
            await asyncio.sleep(0.2)
            assert not scene.history("suspended"), "it is not saved yet"
            scene.held.pop("SaveHeld")
            saves.set()
            await scene.until(lambda: bool(scene.history("suspended")))
            await asyncio.sleep(0.1)

    asyncio.run(play())
    (text,) = scene.history("suspended")
    assert text.endswith(f"is in {DISK}")


def test_a_job_that_is_saved_before_its_copies_have_ended_runs_somewhere_still(
    saving: SavedScene,
) -> None:
    scene = saving

    async def play() -> None:
        ends = scene.held["EndEarlier"] = asyncio.Event()
        async with scene.at_work():
            scene.order()
            await scene.until(lambda: "EndEarlier" in " ".join(scene.said))
            save(scene)
            await scene.until(lambda: where(scene) == (DISK, {}))
            await asyncio.sleep(0.1)
            assert not scene.history("suspended")
            scene.held.pop("EndEarlier")
            ends.set()
            await scene.until(lambda: bool(scene.history("suspended")))

    asyncio.run(play())
    (text,) = scene.history("suspended")
    assert text.endswith(f"is in {DISK}")


@pytest.mark.parametrize(
    "error",
    [StepFailed("save", "no space is left"), ValueError("a defect")],
    ids=["full", "defect"],
)
def test_one_that_fails_says_so_and_leaves_the_job_in_memory(
    saving: SavedScene, error: Exception
) -> None:
    scene = saving

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.fails["SaveHeld"] = [error]
            save(scene)
            with pytest.raises(Refused, match="cannot be saved now: its images are being saved"):
                save(scene)
            await scene.until(lambda: len(scene.history("suspended")) > 1)

    asyncio.run(play())
    assert scene.kinds()[-2:] == ["not saved", "suspended"]
    assert str(error) in scene.history("not saved")[0]
    assert where(scene) == ("", {"a/0": ["h2"], "a/1": ["h2"]})


# ---- stopped meanwhile -------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [True, False])
def test_a_job_that_is_stopped_while_it_is_saved_is_not_called_suspended(
    saving: SavedScene, saved: bool
) -> None:
    scene = saving

    async def play() -> None:
        saves = scene.held["SaveHeld a/1"] = asyncio.Event()
        async with scene.at_work():
            await scene.suspend()
            save(scene)
            await scene.until(lambda: len(scene.asked("SaveHeld")) == 2)
            await scene.stopping.signal(scene.job, signal.SIGTERM, "root")
            await scene.until(lambda: scene.job.state == "ended")
            if not saved:
                scene.fails["SaveHeld a/1"] = [StepFailed("save", "no space is left")]
            scene.held.clear()
            saves.set()
            await scene.until(lambda: not scene.saved.busy)

    asyncio.run(play())
    assert len(scene.history("suspended")) == 1, "before it was stopped"
    row = scene.fleet.journal.snapshots.saved("a")
    if saved:
        assert scene.kinds()[-2:] == ["ended", "saved"]
        assert scene.history("saved") == [f"s2 is in {DISK}, and the job was stopped meanwhile"]
        assert row is not None
        assert (row.name, row.directory) == ("s2", DISK)
    else:
        assert scene.kinds()[-2:] == ["ended", "not saved"]
        assert row is None
    assert bool(scene.disk) is saved


# ---- resumed meanwhile -------------------------------------------------------------------------


@pytest.mark.parametrize("saved", [True, False])
def test_a_job_is_not_resumed_from_images_that_have_been_moved_or_are_being_moved(
    saving: SavedScene, saved: bool
) -> None:
    scene = saving

    async def play() -> None:
        looks = scene.held["GetHeld"] = asyncio.Event()
        saves = scene.held["SaveHeld"] = asyncio.Event()
        async with scene.at_work():
            await scene.suspend()
            resuming = asyncio.ensure_future(scene.resume())
            await scene.until(lambda: bool(scene.asked("GetHeld")))
            save(scene)
            if saved:
                saves.set()
                await scene.until(lambda: where(scene) == (DISK, {}))
            scene.held.pop("GetHeld")
            looks.set()
            why = "images have been moved meanwhile" if saved else "its images are being saved"
            with pytest.raises(Refused, match=f"a cannot be resumed.*{why}"):
                await resuming
            saves.set()
            await scene.until(lambda: len(scene.history("suspended")) > 1)

    asyncio.run(play())
    assert not scene.history("resuming")
    assert (scene.job.state, *where(scene)) == ("suspended", DISK, {})


def test_a_resumption_that_a_restart_interrupts_has_an_end_in_the_history(
    saving: SavedScene,
) -> None:
    """The command that ordered it follows the history, also over the restart."""
    scene = saving

    async def begins() -> None:
        async with scene.at_work():
            scene.suspensions.suspend("root", scene.job, to=DISK, dry_run=False)
            await scene.until(lambda: bool(scene.history("suspended")))
            scene.held["LoadHeld"] = asyncio.Event()
            await scene.resume()
            await scene.until(lambda: bool(scene.asked("LoadHeld")))

    async def goes_on() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("not resumed")))
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(begins())
    scene.held.clear()
    scene.restart()
    asyncio.run(goes_on())
    assert scene.history("not resumed") == ["stays suspended: the orchestrator was restarted"]
    assert scene.job.state == "running"
