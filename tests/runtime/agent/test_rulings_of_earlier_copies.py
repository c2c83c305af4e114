# SPDX-License-Identifier: Apache-2.0
"""What an agent does with copies from before a rewind, and what it recovers of an earlier agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rulings_scene import Migration, Scene

from liveshift.errors import Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import OutgoingNote, write_note


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    (tmp_path / "images").mkdir()
    return Scene(tmp_path / "images")


# ---- after a rewind ----------------------------------------------------------------------------


def book(rewinds: int = 2, job: str = "gpt") -> messages.Book:
    return messages.Book(job, 7, "10.99.7.0/24", {}, rewinds)


@pytest.mark.parametrize(
    ("promised", "done"),
    [(True, ["abandon", "end", "finish"]), (False, ["abandon", "end", "thaw"])],
)
def test_what_leaves_from_before_a_rewind_ends_without_a_ruling(
    scene: Scene, promised: bool, done: list[str]
) -> None:
    scene.leaves(promised=promised)
    scene.ruled = Unreachable("the orchestrator is silent")
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert (scene.done, scene.outgoing, scene.claims) == (done, {}, [])
    assert scene.resident.leaving


def test_what_comes_from_before_a_rewind_is_discarded(scene: Scene) -> None:
    scene.comes()
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert (scene.done, scene.incoming, scene.claims) == (["end", "forget", "discard"], {}, [])


@pytest.mark.parametrize("other", [book(rewinds=1), book(job="other")])
def test_the_copies_of_the_rewind_and_other_jobs_stay(scene: Scene, other: messages.Book) -> None:
    scene.leaves()
    asyncio.run(scene.rulings.drop_earlier(other))
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])


def test_the_work_on_an_earlier_copy_ends_first(scene: Scene) -> None:
    scene.leaves()

    async def both() -> None:
        with scene.working("m1"):
            order = asyncio.create_task(scene.rulings.drop_earlier(book()))
            await asyncio.sleep(0.05)
            assert (scene.done, order.done()) == (["abandon", "end"], False)
        await order

    asyncio.run(both())
    assert (scene.done[-1], scene.outgoing) == ("finish", {})


def test_work_on_an_earlier_copy_that_does_not_end_is_named(scene: Scene) -> None:
    scene.leaves()

    async def busy() -> None:
        with scene.working("m1"):
            await scene.rulings.drop_earlier(book())

    with pytest.raises(Refused, match=r"m1 still works on gpt/1, 0\.1 s after gpt/1 was ended"):
        asyncio.run(busy())
    assert list(scene.outgoing) == ["m1"]


@pytest.mark.parametrize("fails", ["end", "finish"])
def test_an_earlier_copy_that_cannot_be_removed_is_tried_again(scene: Scene, fails: str) -> None:
    scene.leaves()
    scene.fails = fails
    with pytest.raises(StepFailed, match="it failed"):
        asyncio.run(scene.rulings.drop_earlier(book()))
    assert (list(scene.outgoing), scene.not_busy()) == (["m1"], {"m1"})
    scene.fails = ""
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert scene.outgoing == {}


# ---- after a restart ---------------------------------------------------------------------------


class Recovers:
    """What an earlier agent has left of m1, for either side."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scene = scene
        self.incoming: Any = None
        self.outgoing = Migration(scene)
        monkeypatch.setattr(scene, "resident", scene.resident_of)
        monkeypatch.setattr(IncomingMigration, "recover", lambda *_: self.incoming)
        monkeypatch.setattr(OutgoingMigration, "recover", lambda *_: self.outgoing)
        (scene.images / "m1").mkdir()
        write_note(scene.images / "m1", OutgoingNote("m1", "gpt/1"))

    def run(self) -> None:
        asyncio.run(self.scene.recover_migrations())


@pytest.fixture
def recovers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Recovers:
    return Recovers(scene, monkeypatch)


def test_a_tree_that_was_promised_stays_held(scene: Scene, recovers: Recovers) -> None:
    recovers.run()
    found: Any = scene.outgoing
    assert found == {"m1": recovers.outgoing}
    assert scene.done == ["capsules recovered, [] are arriving"]
    assert (scene.images / "m1").exists()


@pytest.mark.parametrize("fails", ["", "thaw"])
def test_a_tree_that_was_being_frozen_goes_on_once_the_host_has_registered(
    scene: Scene, recovers: Recovers, fails: str
) -> None:
    recovers.outgoing.promised, scene.fails = False, fails
    recovers.run()
    assert "thaw" not in scene.done, "the job may have been taken back meanwhile"
    assert (scene.not_busy(), asyncio.run(scene.rulings.claim("m1"))) == (set(), "held")
    assert scene.claims == []
    asyncio.run(scene.let_go_on())
    assert scene.done[-1] == "thaw"
    assert ("m1" in scene.outgoing) is bool(fails)
    assert scene.not_busy() == ({"m1"} if fails else set()), "the next claim tries it again"


def test_a_tree_that_was_being_frozen_before_a_rewind_never_goes_on(
    scene: Scene, recovers: Recovers
) -> None:
    recovers.outgoing.promised = False
    recovers.run()
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert scene.done[1:] == ["abandon", "end", "thaw"], "its tasks have ended before it is thawed"
    asyncio.run(scene.let_go_on())
    assert scene.done[-1] == "thaw"
    assert (scene.outgoing, len(scene.done)) == ({}, 4)


def test_an_earlier_copy_that_could_not_be_ended_is_not_let_go_on(
    scene: Scene, recovers: Recovers
) -> None:
    recovers.outgoing.promised, scene.fails = False, "end"
    recovers.run()
    with pytest.raises(StepFailed):
        asyncio.run(scene.rulings.drop_earlier(book()))
    asyncio.run(scene.let_go_on())
    assert "thaw" not in scene.done
    assert list(scene.outgoing) == ["m1"]


def test_what_is_left_of_a_capsule_that_is_gone_is_removed(
    scene: Scene, recovers: Recovers
) -> None:
    scene.capsules.clear()
    recovers.run()
    assert (scene.outgoing, scene.incoming) == ({}, {})
    assert not (scene.images / "m1").exists()


def test_images_that_are_held_for_others_are_no_migrations(
    scene: Scene, recovers: Recovers
) -> None:
    held = scene.images / "held/gpt.1/s17"
    held.mkdir(parents=True)
    recovers.run()
    assert held.exists()
    assert "held" not in {*scene.outgoing, *scene.incoming}


@pytest.mark.parametrize("epoch", [3, 5])
def test_a_capsule_that_has_come_back_since_is_not_held(
    scene: Scene, recovers: Recovers, epoch: int
) -> None:
    """m1 took it away under epoch 3, and could not clear up here; now it runs under epoch 5."""
    write_note(scene.images / "m1", OutgoingNote("m1", "gpt/1", [], epoch))
    recovers.run()
    assert ("m1" in scene.outgoing) is (epoch == scene.capsules["gpt/1"].epoch)


def test_a_note_that_cannot_be_read_is_none(scene: Scene, recovers: Recovers) -> None:
    (scene.images / "m1" / "departure").write_bytes(b"\xc1")
    recovers.run()
    assert scene.outgoing == {}
    assert not (scene.images / "m1").exists()


@pytest.mark.parametrize("runs", [False, True])
def test_an_image_is_kept_unless_its_tree_runs(
    scene: Scene, recovers: Recovers, runs: bool
) -> None:
    directory = SimpleNamespace(name="gpt.1")
    sandbox = SimpleNamespace(plan=SimpleNamespace(directory=directory))
    recovers.incoming = SimpleNamespace(
        resume_recovered=lambda: runs, resident=SimpleNamespace(sandbox=sandbox)
    )
    (scene.images / "m1" / "departure").unlink()
    recovers.run()
    assert ("m1" in scene.incoming) is not runs
    assert (scene.images / "m1").exists() is not runs
    assert scene.done == [f"capsules recovered, {[] if runs else ['gpt.1']} are arriving"]
