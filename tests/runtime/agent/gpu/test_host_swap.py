# SPDX-License-Identifier: Apache-2.0
"""A swap on its host: a stand-in for the device state of processes, made to fail at each step.

Whatever fails, a process ends up on one GPU or the other, or its capsule is ended; the note says
which, also to an agent's next life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from swap_doubles import AWAY, NO_ROOM, PAIRS, STUCK, Driver, Tree

from liveshift.criu_glue.capsule import sandboxes
from liveshift.errors import LiveshiftError, StepFailed, Unreachable
from liveshift.runtime.agent.gpu import host_swap
from liveshift.runtime.agent.gpu.device_state import SavedDevices
from liveshift.runtime.agent.gpu.devices import DeviceTree
from liveshift.runtime.agent.gpu.host_swap import HostSwap, Stage, SwapNote
from liveshift.runtime.agent.host.running_capsule import RunningCapsule
from liveshift.runtime.model.stopwatch import Stopwatch

BAD = StepFailed("gpu verify", "2 of 3 allocations are not what they were")


@dataclass
class Scene:
    driver: Driver
    resident: RunningCapsule
    ended: list[object]

    def swap(self, note: SwapNote | None = None) -> HostSwap:
        note = note or SwapNote("m7", Stage.SAVING, PAIRS, [1001, 1002])
        return HostSwap(self.resident, note, lambda pid: cast(DeviceTree, Tree(self.driver, pid)))

    def run(self, *, deadline: float = 60.0) -> LiveshiftError | None:
        """What it raised; its last note is as the next life reads it."""
        here = self.swap()
        try:
            moved = here.run(deadline)
        except LiveshiftError as error:
            assert here.note == self.note
            return error
        assert here.note == self.note
        assert all(phase.frozen for phase in moved.phases)
        assert moved.bytes == 0
        return None

    @property
    def note(self) -> SwapNote:
        note = host_swap.read(self.resident)
        assert note is not None
        return note

    def left(self, stage: Stage, where: str, **more: Any) -> SwapNote:
        """An agent ended at that stage of the first process; its next life ends the swap."""
        self.driver.where[1001] = where
        note = SwapNote("m7", stage, PAIRS, more.pop("pids", [1001]), **more)
        host_swap.write(self.resident, note)
        self.swap(self.note).finish()
        return self.note


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    ended: list[object] = []
    monkeypatch.setattr(sandboxes, "end", ended.append)
    stands = SimpleNamespace(plan=SimpleNamespace(directory=tmp_path))
    return Scene(Driver(), cast(RunningCapsule, SimpleNamespace(sandbox=stands)), ended)


def test_one_process_after_the_other(scene: Scene) -> None:
    assert scene.run() is None
    assert scene.driver.done == [
        "save 1001",
        "new 1001",
        "verify new 1001",
        "save 1002",
        "new 1002",
        "verify new 1002",
    ]
    assert scene.note == SwapNote("m7", Stage.SWAPPED, PAIRS, [], [1001, 1002])
    assert (scene.driver.where, scene.ended) == ({1001: "new", 1002: "new"}, [])


@pytest.mark.parametrize(
    ("step", "way"),
    [
        ("save 1001", StepFailed("gpu lock", "rank 1 is in a kernel")),
        ("save 1001", ZeroDivisionError("a slip")),
        ("new 1001", NO_ROOM),
    ],
)
def test_what_fails_with_the_state_off_goes_back(scene: Scene, step: str, way: Exception) -> None:
    scene.driver.fails[step] = [way]
    with pytest.raises(type(way), match=str(way)):
        scene.swap().run(60.0)
    assert (scene.note.stage, scene.note.why) == (Stage.STAYS, str(way))
    assert (scene.driver.where, scene.ended) == ({1001: "old", 1002: "old"}, [])
    assert scene.driver.done[-2:] == ["old 1001", "verify old 1001"]


def test_a_process_that_is_gone_has_nothing_to_save(scene: Scene) -> None:
    del scene.driver.where[1001]
    error = scene.run()
    assert str(error) == "gpu save: process 1001 is gone"
    assert (scene.note.stage, scene.driver.done, scene.ended) == (Stage.STAYS, [], [])


def test_a_deadline_that_has_passed_leads_back(scene: Scene) -> None:
    error = scene.run(deadline=-1.0)
    assert error is not None
    assert "it took longer than" in str(error)
    assert (scene.note.stage, scene.driver.where[1001]) == (Stage.STAYS, "old")


def test_the_second_process_goes_back_and_the_first_one_stays_there(scene: Scene) -> None:
    scene.driver.fails["new 1002"] = [NO_ROOM]
    assert scene.run() is NO_ROOM
    assert scene.driver.where == {1001: "new", 1002: "old"}
    assert scene.note.stage is Stage.STAYS
    assert scene.note.why == f"{NO_ROOM} (on the other GPU already: process 1001)"
    assert scene.note.done == [1001]


def test_where_the_state_is_on_the_other_gpu_there_is_only_on(scene: Scene) -> None:
    scene.driver.fails["verify new 1001"] = [StepFailed("gpu", "its service thread is late")]
    assert scene.run() is None
    assert scene.driver.done[:5] == [
        "save 1001",
        "new 1001",
        "verify new 1001",
        "new 1001",
        "verify new 1001",
    ]
    assert scene.note.stage is Stage.SWAPPED


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ({"verify new 1001": [BAD, BAD]}, str(BAD)),
        ({"new 1001": [STUCK]}, str(STUCK)),
        ({"new 1001": [NO_ROOM], "old 1001": [NO_ROOM, NO_ROOM]}, "it cannot go back"),
        ({"new 1001": [NO_ROOM], "old 1001": [STUCK]}, "it cannot go back"),
        ({"save 1001": [NO_ROOM], "verify old 1001": [BAD, BAD]}, "it cannot go back"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_device_state_that_is_lost_ends_the_capsule(
    scene: Scene, fails: dict[str, list[Exception | None]], why: str
) -> None:
    scene.driver.fails = fails
    assert scene.run() is not None
    assert scene.note.stage is Stage.LOST
    assert scene.note.why.startswith("its device state is lost, so it was ended: ")
    assert why in scene.note.why
    assert scene.ended == [scene.resident.sandbox]


def test_going_back_is_tried_twice(scene: Scene) -> None:
    scene.driver.fails = {"new 1001": [NO_ROOM], "old 1001": [NO_ROOM]}
    assert scene.run() is NO_ROOM
    assert (scene.note.stage, scene.driver.where[1001]) == (Stage.STAYS, "old")


@pytest.mark.parametrize(
    ("fails", "stage", "end"),
    [
        ({"save 1001": [AWAY], "old 1001": [AWAY]}, Stage.RETURNING, "old"),
        ({"new 1001": [AWAY]}, Stage.BRINGING, "new"),
        ({"new 1001": [NO_ROOM], "old 1001": [AWAY]}, Stage.RETURNING, "old"),
    ],
    ids=["saving", "bringing", "returning"],
)
def test_while_its_helper_is_away_nothing_is_decided(
    scene: Scene, fails: dict[str, list[Exception | None]], stage: Stage, end: str
) -> None:
    scene.driver.fails = fails
    assert scene.run() is AWAY
    assert scene.note.stage is stage
    again = scene.swap(scene.note)
    scene.driver.fails = {f"{end} 1001": [AWAY]}
    with pytest.raises(Unreachable):
        again.finish()
    again = scene.swap(scene.note)
    again.finish()
    assert again.note.over
    assert (scene.driver.where[1001], scene.ended) == (end, [])
    assert again.note.stage is Stage.STAYS, "the second process is not begun any more"
    assert scene.driver.where[1002] == "old"
    assert "save 1002" not in scene.driver.done


# ---- an agent's next life ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["old", "off"])
@pytest.mark.parametrize("stage", [Stage.SAVING, Stage.RETURNING])
def test_what_was_not_on_its_way_over_goes_back(scene: Scene, stage: Stage, where: str) -> None:
    note = scene.left(stage, where)
    assert (note.stage, scene.driver.where[1001]) == (Stage.STAYS, "old")
    assert note.why == "swap: the agent was restarted"


@pytest.mark.parametrize("where", ["off", "new"])
def test_what_was_on_its_way_over_arrives(scene: Scene, where: str) -> None:
    saved = [SavedDevices(1001, used={"GPU-a": 80}, sums={0x1000: 7}, samples=4)]
    note = scene.left(Stage.BRINGING, where, saved=saved)
    assert (note.stage, scene.driver.where[1001]) == (Stage.SWAPPED, "new")
    assert note.done == [1001]


def test_what_cannot_arrive_goes_back(scene: Scene) -> None:
    scene.driver.fails["new 1001"] = [NO_ROOM]
    note = scene.left(Stage.BRINGING, "off", pids=[1001, 1002])
    assert (note.stage, note.why, scene.driver.where[1001]) == (
        Stage.STAYS,
        str(NO_ROOM),
        "old",
    )


def test_further_processes_are_not_begun(scene: Scene) -> None:
    note = scene.left(Stage.BRINGING, "off", pids=[1001, 1002])
    assert note.stage is Stage.STAYS
    assert note.why == "the agent was restarted (on the other GPU already: process 1001)"
    assert scene.driver.where == {1001: "new", 1002: "old"}


def test_what_is_over_is_left_alone(scene: Scene) -> None:
    for stage in host_swap.ENDS:
        assert scene.left(stage, "new").stage is stage
    assert scene.driver.done == []


def test_checksums_go_with_the_note(scene: Scene) -> None:
    seen: list[list[SavedDevices]] = []

    class Looking(Tree):
        def bring_back(self, watch: Stopwatch, gpus: Sequence[tuple[str, str]] = ()) -> None:
            seen.append(list(self.saved))
            super().bring_back(watch, gpus)

    saved = [SavedDevices(1001, used={"GPU-a": 80}, sums={0x1000: 7}, samples=4)]
    scene.driver.where[1001] = "off"
    note = SwapNote("m7", Stage.BRINGING, PAIRS, [1001], [], saved)
    host_swap.write(scene.resident, note)
    HostSwap(
        scene.resident, scene.note, lambda pid: cast(DeviceTree, Looking(scene.driver, pid))
    ).finish()
    assert seen == [saved]


def test_a_note_that_cannot_be_read_is_none(scene: Scene) -> None:
    assert host_swap.read(scene.resident) is None
    path = scene.resident.sandbox.plan.directory / host_swap.NOTE
    path.write_bytes(msgspec.msgpack.encode({"migration": "m7", "stage": "flying"}))
    assert host_swap.read(scene.resident) is None
