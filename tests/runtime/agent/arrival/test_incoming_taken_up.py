# SPDX-License-Identifier: Apache-2.0
"""What a restarted agent takes up of an arrival, from what lies beside the image.

Note, manifest and sandboxes are real (a process of ours is process 1); tree and devices stand in.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_scenes import gpu_survey, process
from preflight_scene import HERE, NOTHING

from liveshift.criu_glue.capsule.sandboxes import Sandbox, started
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.memory.store.store import MemoryStore
from liveshift.errors import NotFound
from liveshift.runtime.agent.arrival import incoming_migration
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.arrival.incoming_note import NOTE
from liveshift.runtime.agent.arrival.incoming_phase import IncomingPhase
from liveshift.runtime.agent.gpu.device_memory import TABLE
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory, RunningCapsule
from liveshift.runtime.config.cluster import Files, Logs, Paths
from liveshift.runtime.messages import Book, CapsuleSpec, Reserve
from liveshift.runtime.model import manifest
from liveshift.runtime.model.manifest import Manifest
from liveshift.runtime.wire import PAGE_TABLE

PAIRS = [("GPU-a", "GPU-x"), ("GPU-b", "GPU-y")]
SPEC = CapsuleSpec("gpt/1", "gpt", 1, ["train"], {}, "/", 1000, 1000, [], "")
BOOK = Book("gpt", 7, "10.99.7.0/24", {})
OURS = os.getpid()


class Scene:
    """What the first agent of h1 has made of m1, and the next one finds."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = Paths(state=top / "state", run=top / "run", keys=top / "keys")
        times = SimpleNamespace(suspicion=1.0)
        cluster: Any = SimpleNamespace(paths=paths, files=Files(), logs=Logs(), timeouts=times)
        self.factory = CapsuleFactory(cluster, "h1")
        gpu = gpu_survey(process({"GPU-b": 1}))
        self.reserve = Reserve(
            "m1", SPEC, NOTHING, HERE, "h0", 3, BOOK, 1 << 30, dry_run=False, gpu=gpu
        )
        self.left: list[tuple[str, RunningCapsule]] = []
        self.devices: Any = SimpleNamespace(left=self.find)
        self.found: Any = None
        self.trees: list[Path] = []
        monkeypatch.setattr(RestoringTree, "take_up", lambda tree: self.trees.append(tree._images))
        # The real method kills all processes in the pid namespace of process 1. Here process 1 is
        # this test, so it would kill all processes of the machine.
        monkeypatch.setattr(RestoringTree, "drop", no_drop)
        self.first = self.arrive()

    def find(self, migration: str, resident: RunningCapsule) -> Any:
        self.left.append((migration, resident))
        return self.found

    def arrive(self, init: int = OURS, since: int = 0) -> IncomingMigration:
        sandbox = Sandbox(self.factory.plan(SPEC), init, since or started(init))
        sandbox.plan.directory.mkdir(parents=True, exist_ok=True)
        resident = self.factory.resident(self.reserve, sandbox)
        first = IncomingMigration(self.reserve, resident, self.factory, gpus=PAIRS)
        first.write_note()
        return first

    def complete(self, *streams: str) -> None:
        found = Manifest(3, "m1", "gpt/1", 14, {s: (5, 0) for s in streams}, {}, {}, [])
        manifest.save(self.first.images, found, {"/data": {"came"}}, {"tmp": {"put"}})

    def again(self) -> IncomingMigration | None:
        return IncomingMigration.recover("m1", self.factory, self.devices)


def no_drop(_tree: RestoringTree) -> None:
    raise AssertionError("a tree is dropped that was taken up")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_complete_image_in_a_sandbox_that_stands_is_taken_up(scene: Scene) -> None:
    scene.complete("image:core-1.img")
    here = scene.again()
    assert here is not None
    assert here.complete
    assert (here.migration, here._reserve.source, here.gpus) == ("m1", "h0", PAIRS)
    assert (here.resident.spec, here.resident.epoch) == (SPEC, 3)
    assert (here.resident.sandbox.init, here.resident.sandbox.started) == (OURS, started(OURS))
    here.check_may_restore(1)  # its sandbox stands, and no attempt has failed
    assert here.phase is IncomingPhase.COMPLETE
    assert here.gpus_promised == ["GPU-y"], "they stay promised"
    place = here.inbox.place
    assert (place.came, place.written) == ({"/data": {"came"}}, {"tmp": {"put"}})
    assert scene.trees == [here.images], "the tree goes on where the first agent has left it"
    assert here.granted == 0


def test_its_devices_are_looked_for_once_they_are_needed(scene: Scene) -> None:
    scene.complete("image:core-1.img", TABLE)
    (scene.first.images / TABLE).write_bytes(b"\x90")
    here = scene.again()
    assert here is not None
    assert scene.left == []
    scene.found = SimpleNamespace(drop=lambda: scene.trees.clear())
    here.free_images()
    assert scene.left == [("m1", here.resident)]
    assert scene.trees == [], "the helper of this host forgets its memory"
    assert not here.images.exists()


def test_a_capsule_without_gpus_has_no_devices_to_look_for(scene: Scene) -> None:
    sandbox = scene.first.resident.sandbox
    plain = IncomingMigration(
        scene.reserve, scene.factory.resident(scene.reserve, sandbox), scene.factory
    )
    plain.write_note()
    scene.complete("image:core-1.img")
    here = scene.again()
    assert here is not None
    here.free_images()
    assert scene.left == []


def test_without_a_note_that_is_understood_there_is_nothing(scene: Scene) -> None:
    scene.complete("image:core-1.img")
    note = scene.first.images / NOTE
    note.write_bytes(note.read_bytes()[:-7])
    assert scene.again() is None
    note.unlink()
    assert scene.again() is None


@pytest.mark.parametrize("noted", [False, True])
def test_an_image_that_is_not_complete_is_not_taken_up(scene: Scene, noted: bool) -> None:
    """Its source has promised nothing, and goes on."""
    if noted:
        scene.first.resident.note()
    assert scene.again() is None


@pytest.mark.parametrize("noted", [False, True])
def test_one_whose_memory_is_gone_is_taken_up_if_it_may_run(scene: Scene, noted: bool) -> None:
    """It has its memory then, and what came was used up for it."""
    scene.complete("image:core-1.img", PAGE_TABLE)
    if noted:
        scene.first.resident.note()
    assert (scene.again() is not None) is noted


@pytest.mark.parametrize("noted", [False, True])
def test_one_whose_sandbox_has_ended_is_not_taken_up(scene: Scene, noted: bool) -> None:
    scene.first = scene.arrive(since=started(OURS) + 1)
    scene.complete("image:core-1.img")
    if noted:
        scene.first.resident.note()
    assert scene.again() is None


def test_the_memory_that_came_is_there_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.complete("image:core-1.img", PAGE_TABLE)
    state = SimpleNamespace(frees_after_copy=False, lost=0, close=lambda: None)
    store: Any = state
    load: Callable[..., Any] = lambda images: store if images == scene.first.images else None  # noqa: E731
    monkeypatch.setattr(MemoryStore, "load", load)
    here = scene.again()
    assert here is not None
    assert here.inbox.memory is store
    here.fail(1, "CRIU broke off")
    here.check_may_restore(2)
    state.lost = 1
    with pytest.raises(NotFound, match="was used up by an attempt that failed: CRIU broke off"):
        here.check_may_restore(2)


@pytest.mark.parametrize("stands", [True, False])
def test_the_memory_of_one_that_runs_or_has_ended_is_freed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    """Nobody frees its image later: the directory is removed, and an open store keeps the pages."""
    closed: list[Path] = []
    state = SimpleNamespace(frees_after_copy=False, lost=0)

    def load(images: Path) -> Any:
        state.close = lambda: closed.append(images)
        return state

    monkeypatch.setattr(MemoryStore, "load", load)
    if not stands:
        scene.first = scene.arrive(since=started(OURS) + 1)
    scene.complete("image:core-1.img", PAGE_TABLE)
    scene.first.resident.note()
    here = scene.again()
    if stands:
        assert here is not None
        monkeypatch.setattr(here._restored, "finish_letting_go", lambda *_: None)
        monkeypatch.setattr(incoming_migration, "hand_over", lambda _sandbox: None)
        (scene.first.images / "resumed").touch()
        assert closed == []
        assert here.resume_recovered()
        assert here.phase is IncomingPhase.RUNNING
        assert here.inbox.memory is None
    assert closed == [scene.first.images]


def test_a_directory_that_is_there_already_does_not_stop_an_arrival(scene: Scene) -> None:
    assert scene.first.images.is_dir()
    assert scene.arrive().images == scene.first.images


def test_device_memory_comes_to_the_gpus_that_were_chosen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    inlets: list[tuple[Any, ...]] = []

    def inlet(*which: Any) -> Any:
        inlets.append(which)
        return which

    monkeypatch.setattr(incoming_migration, "DeviceInlet", inlet)
    devices: Any = SimpleNamespace()
    here = IncomingMigration(
        scene.reserve, scene.first.resident, scene.factory, None, devices, PAIRS
    )
    assert inlets == [(devices, {"GPU-a": "GPU-x", "GPU-b": "GPU-y"})]
    made: Any = here.inbox.devices
    assert made == inlets[0]
    plain = IncomingMigration(scene.reserve, scene.first.resident, scene.factory)
    assert len(inlets) == 1
    assert plain.inbox.devices is None
    assert plain.gpus == []
