# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is taken, and what people and later orchestrators learn of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from due_scene import OFTEN, Recorded, Scene, a_move, scene, soon
from orchestrator_parts import Parts
from snapshot_stage import SnapshotStage
from waits import until_async

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.messages import ProtectionRow
from liveshift.runtime.model.interval import SnapshotCost
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.moves.context import OrchestratorContext
from liveshift.runtime.protection import protection as module
from liveshift.runtime.quiesce.gates import Boundary
from liveshift.runtime.snapshot.snapshot import Snapshot

__all__ = ["scene", "soon"]


def test_snapshots_follow_each_other_and_a_person_sees_the_newest(scene: Scene) -> None:
    scene.run(lambda: len(scene.stage.completed) == 2)
    row = scene.row()
    assert (row.every, row.newest, row.holders, row.why_not) == (1.0, "s2", ["h2"], "")
    assert row.bytes == 200
    assert 0 <= row.age < 5
    assert 0 < row.pause_s < 5
    assert ("protected", "protected: a snapshot every 1 s, held by h2") in scene.events()
    assert [kind for kind, _ in scene.events()].count("protected") == 1
    first, second = scene.stage.completed
    assert second.time - first.time >= 0.9, "the interval passes between them"
    assert scene.job.taking == 0
    assert scene.fleet.snapshots == {}


def test_a_job_on_one_host_is_told_that_a_person_would_be_needed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, hosts=("h0", "h0"))
    scene.run(lambda: len(scene.stage.completed) == 2)
    said = [text for kind, text in scene.events() if kind == "protected"]
    (told,) = said
    assert told.endswith("; if h0 died, `liveshift rewind a --lost h0` would be needed")


def test_a_job_trains_four_times_as_long_as_a_snapshot_has_paused_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer than the interval must not be followed by the next one at once."""
    pauses = []

    async def slow(self: Recorded, job: Job) -> str:
        await asyncio.sleep(0.6)
        pauses.append(time.time())
        return await SnapshotStage.open_gates(self, job)

    monkeypatch.setattr(Recorded, "open_gates", slow)
    scene.run(lambda: len(scene.stage.completed) == 2)
    second = scene.stage.completed[1]
    assert second.time - pauses[0] >= module.REST * 0.6


def test_snapshots_that_are_switched_off_leave_none_to_go_back_to(scene: Scene) -> None:
    """Days later a rewind would undo days of training."""
    scene.run(lambda: scene.job.newest is not None)
    off = replace(scene.fleet.cluster.snapshots, every=None)
    scene.fleet.cluster = replace(scene.fleet.cluster, snapshots=off)
    scene.run(lambda: scene.job.newest is None)
    assert scene.fleet.journal.snapshots.newest("a") is None
    (said,) = [text for kind, text in scene.events() if kind == "unprotected"]
    assert "snapshots are off" in said
    assert scene.job.state == "running"


def test_there_are_none_where_they_are_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path, '[snapshots]\nevery = "off"\n')
    looked = time.monotonic()
    scene.run(lambda: time.monotonic() - looked > 0.1)
    assert scene.stage.said == []
    assert scene.row() == ProtectionRow()


def test_a_job_is_protected_without_being_asked_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "")
    scene.run(lambda: scene.stage.completed)
    assert scene.row().auto
    ((kind, text),) = scene.events()
    assert kind == "protected"
    assert text.endswith("held by h2")


@pytest.mark.parametrize(("own", "every"), [(0.0, 1.0), (7.0, 7.0), (-1.0, 0.0)])
def test_a_job_may_have_an_interval_of_its_own(scene: Scene, own: float, every: float) -> None:
    request = messages.RunJob("a", 2, ["true"], {}, "/", 0, [], snapshot_every=own)
    scene.job.request = request
    assert scene.job.snapshot_every(scene.fleet.cluster) == every
    assert scene.row().every == every


def test_the_orchestrator_may_choose_how_often(tmp_path: Path) -> None:
    scene = Scene(tmp_path, OFTEN.replace("every = 1", 'every = "auto"\nmttf = "1h"'))
    # 5 s for each, as nothing is known: they may come every 5 / 0.005 s.
    assert (scene.row().every, scene.row().auto) == (1000.0, True)
    scene.run(lambda: (scene.job.snapshot_cost or SnapshotCost(0.0)).slowed_s)
    cost = scene.job.snapshot_cost
    assert cost is not None
    assert cost.pause_s == scene.row().pause_s
    assert cost.slowed_s == pytest.approx(2.0 - cost.pause_s, abs=0.5), "3 s, of which 1 was used"
    assert scene.row().every == pytest.approx(cost.lost_s / 0.005)
    assert len(scene.stage.completed) == 1
    (event,) = scene.events()
    assert event[0] == "protected"


def test_an_interval_that_is_chosen_anew_is_not_noted_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, OFTEN.replace("every = 1", 'every = "auto"'))
    intervals = iter([1.0, 0.05, 0.07, 0.06] + [0.05] * 1000)
    monkeypatch.setattr(Job, "snapshot_every", lambda _job, _cluster, _seen: next(intervals, 0.05))
    scene.run(lambda: len(scene.stage.completed) == 4)
    assert [kind for kind, _ in scene.events()] == ["protected"]


def test_a_failure_keeps_the_snapshot_before_and_is_noted_once(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed)
    refusal = Refused("h2 has no room", hint="9 GB would do")
    scene.stage.fail("Hold", *[refusal] * 100)
    scene.run(lambda: scene.job.unprotected)
    row = scene.row()
    assert (row.newest, row.why_not) == ("s1", "")
    assert row.trouble == "h2 has no room (9 GB would do)"
    assert ("snapshot", "s2 failed: h2 has no room (9 GB would do); s1 stays") in scene.events()
    newest = scene.fleet.journal.snapshots.newest("a")
    assert newest is not None
    assert newest.number == 1
    assert scene.fleet.journal.snapshots.snapshots_under_way() == []
    assert scene.job.taking == 0, "so the holder's claim for its part ends"


def test_none_is_taken_while_a_link_of_the_job_is_cut(tmp_path: Path) -> None:
    """It would find no boundary, and hold the ranks at their gates until it knows."""
    scene = Scene(tmp_path)
    for held in scene.fleet.hosts.values():
        held.heard = time.monotonic()
    assert scene.snapshots.hindrance(scene.job) == ""
    first, second = scene.job.capsules.values()
    silent = {scene.job.overlay.address(second.index): 3.0}
    state = messages.CapsuleState("a/0", first.epoch, 2, 0, 9, 1.0, [0], "true", unanswered=silent)
    first.seen = second.seen = state
    first.reported = second.reported = time.monotonic()
    assert scene.snapshots.hindrance(scene.job) == "h0 and h1 do not reach each other"
    first.progressed = time.monotonic()
    assert scene.snapshots.hindrance(scene.job) == "", "it trains all the same"


def test_a_failure_that_has_paused_the_job_is_not_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job whose snapshots fail would pay more for them than ``cost``."""
    scene = Scene(tmp_path, OFTEN.replace("every = 1", 'every = "auto"\ncost = 0.0005'))

    async def slow(self: Recorded, job: Job) -> str:
        await asyncio.sleep(0.05)
        return await SnapshotStage.open_gates(self, job)

    monkeypatch.setattr(Recorded, "open_gates", slow)
    scene.stage.fail("DumpCapsule a/1", Refused("CRIU cannot dump it"))
    begun = time.monotonic()
    scene.run(lambda: scene.job.unprotected)
    (state,) = scene.protection._states.values()
    assert state.due - begun > 0.05 / 0.0005
    assert state.due - begun > 3 * module.RETRY_S


def test_none_is_taken_while_a_capsule_moves(scene: Scene) -> None:
    move = a_move(scene).name
    looked = time.monotonic()
    scene.run(lambda: scene.job.unprotected, lambda: time.monotonic() - looked > 0.1)
    assert scene.stage.said == []
    assert scene.row().why_not == f"{move} is under way: the next snapshot is taken after it"


def test_what_an_earlier_orchestrator_has_left_is_given_up(scene: Scene) -> None:
    journal = scene.fleet.journal.snapshots
    assert journal.begin_snapshot("a") == 1
    assert journal.snapshots_under_way() == [(1, "a")]
    scene.stage.gates_closed = True
    for host in scene.fleet.hosts.values():
        host.heard = time.monotonic()

    async def act() -> None:
        scene.snapshots.recover()
        assert scene.job.taking == 1
        await until_async(lambda: not scene.fleet.snapshots)

    asyncio.run(act())
    assert not scene.stage.gates_closed
    assert {line for line in scene.stage.said if line.startswith("Thaw")} == {
        "ThawCapsule a/0",
        "ThawCapsule a/1",
    }
    assert journal.snapshots_under_way() == []
    assert scene.job.taking == 0


class Gates:
    """Gates that open and close at once."""

    def __init__(self) -> None:
        self.did: list[str] = []

    async def close(self, job: Job, _limits: object, shared: bool) -> Boundary:
        self.did.append(f"closed, shared {shared}")
        return Boundary("paused after collective 7")

    async def open(self, job: Job, _limits: object) -> str:
        self.did.append("opened")
        return ""


def test_a_move_closes_the_gates_after_a_snapshot_has_opened_them(scene: Scene) -> None:
    gates = Gates()
    context: OrchestratorContext = Parts(scene.fleet, gates=gates).context
    move = a_move(scene)

    async def act() -> None:
        snapshot = Snapshot(context, 1, scene.job, {})
        scene.fleet.snapshots["a"] = snapshot
        snapshot.released.clear()
        await context.close_gates(scene.job)
        move.holds_gates = True
        closing = asyncio.create_task(context.quiesce(move))
        await asyncio.sleep(0.02)
        assert gates.did == ["closed, shared False"], "the move waits"
        assert context.at_gates(scene.job) == move.name
        await context.open_gates(scene.job)
        snapshot.released.set()
        assert await closing == "paused after collective 7"

    asyncio.run(act())
    assert gates.did == ["closed, shared False", "opened", "closed, shared False"]
