# SPDX-License-Identifier: Apache-2.0
"""A snapshot of a capsule with CUDA processes: device state leaves the GPUs before the network
is locked, and comes back after every end. CUDA is a stand-in, as are CRIU, wire and network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from outgoing_scene import INIT, OPENED
from snapshot_scene import AHEAD, DIGEST, DUMP, LOCK, SnapshotScene, snapshots
from waits import until

from liveshift.criu_glue.capsule import sandboxes
from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure.outgoing_note import NOTE, OutgoingNote
from liveshift.runtime.agent.gpu.device_state import DeviceLost

__all__ = ["snapshots"]

SAVED, BACK = "device state saved", "device state back"
THAWED = ["thaw", OPENED, BACK]


@pytest.fixture
def scene(snapshots: SnapshotScene, monkeypatch: pytest.MonkeyPatch) -> SnapshotScene:
    devices: Any = SimpleNamespace(saved=[], drop=snapshots.note("device memory dropped"))
    devices.save = lambda _watch: snapshots.note(SAVED)()
    devices.bring_back = lambda _watch: snapshots.note(BACK)()
    snapshots.snapshot._frozen.devices = devices
    snapshots.snapshot.gpus = ["GPU-a"]
    snapshots.factory.cluster.timeouts.restore = 60.0
    monkeypatch.setattr(sandboxes, "end", lambda _sandbox: ended(snapshots))
    return snapshots


def ended(scene: SnapshotScene) -> None:
    scene.note("ended")()
    scene.alive = False


def off_gpus(scene: SnapshotScene) -> bool:
    """Read again: a type checker takes an attribute for what the last assertion found."""
    return scene.snapshot.off_gpus


def test_device_state_leaves_at_the_lock_and_is_back_after_the_thaw(scene: SnapshotScene) -> None:
    scene.ahead()
    assert not off_gpus(scene)
    scene.lock()
    assert off_gpus(scene)
    assert scene.done == [*AHEAD, LOCK[0], SAVED, *LOCK[1:]]
    note = msgspec.msgpack.decode((scene.images / NOTE).read_bytes(), type=OutgoingNote)
    assert note == OutgoingNote("s17.1", "gpt/1", ["GPU-a"], 3), "for a restarted agent"
    scene.dump()
    scene.snapshot.thaw()
    assert scene.done[len(AHEAD + LOCK) + 1 :][: len(DUMP) + 3] == [*DUMP, *THAWED]
    assert not off_gpus(scene)
    scene.ends()
    assert scene.snapshot.digest == DIGEST
    assert scene.goes_on()


@pytest.mark.parametrize(("step", "fails"), [("lock", SAVED), ("lock", LOCK[1]), ("dump", "dump")])
def test_after_an_error_device_state_comes_back(
    scene: SnapshotScene, step: str, fails: str
) -> None:
    scene.ahead()
    if step == "dump":
        scene.lock()
    scene.fails = fails
    with pytest.raises(StepFailed):
        getattr(scene, step)()
    assert scene.done[-1 - scene.done[::-1].index(BACK)] == BACK
    assert scene.done.index(BACK) > scene.done.index(fails)
    assert scene.goes_on()


def test_device_state_that_does_not_come_back_is_tried_again(scene: SnapshotScene) -> None:
    """The GPU may have too little memory for a time."""
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails = BACK
    with pytest.raises(StepFailed):
        scene.snapshot.thaw()
    until(lambda: scene.done.count(BACK) > 2)
    assert "ended" not in scene.done
    scene.fails = ""
    scene.ends()
    assert scene.goes_on()
    assert scene.snapshot.digest == DIGEST, "the holder has the image nevertheless"


@pytest.mark.parametrize("protected", [True, False])
def test_a_capsule_that_stays_without_its_device_state_is_ended_if_its_job_can_go_back(
    scene: SnapshotScene, protected: bool
) -> None:
    scene.snapshot._protected = protected
    scene.factory.cluster.timeouts.restore = 0.0
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails = BACK
    with pytest.raises(StepFailed):
        scene.snapshot.thaw()
    until(lambda: scene.done.count(BACK) > 2 or "device memory dropped" in scene.done)
    assert ("ended" in scene.done) == protected
    scene.fails = ""
    scene.ends()
    assert scene.done.count("ended") == protected, "once"


def test_a_capsule_whose_device_state_is_lost_is_ended_at_once(scene: SnapshotScene) -> None:
    """And the snapshot leaves nothing behind."""
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails, scene.error = BACK, lambda _: DeviceLost("gpu restore", "Xid 79")
    with pytest.raises(DeviceLost, match="Xid 79; so it was ended"):
        scene.snapshot.thaw()
    scene.ends()
    assert scene.done.count("ended") == 1
    assert "device memory dropped" in scene.done
    assert scene.done.count(f"lock {INIT}") == 1
