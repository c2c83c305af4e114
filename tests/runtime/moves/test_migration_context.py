# SPDX-License-Identifier: Apache-2.0
"""What moves stand on: gates of their job, spares, what hosts say of them, and what of their steps
is written down and when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from journal_rows import row
from migration_service_scene import Scene, play
from orchestrator_parts import Parts
from waits import until_async

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.fleet import fleet
from liveshift.runtime.migration import migration_records as module
from liveshift.runtime.migration.gpu_swap import GpuSwap
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.gpu_asked import GpuAsked
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.ownership import Side
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import context
from liveshift.runtime.quiesce.gates import Boundary

NEVER = float("inf")
DOWN = Unreachable("communicators are down, and h0 does not answer")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, "[timeouts]\nsuspicion = 1\nheartbeat = 0.02\n")


class Clock:
    """Goes on when a test says so, however long the machine lets the test wait."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Tells when hosts were heard, and how long a job's gates wait for them."""
    clock = Clock()
    monkeypatch.setattr(context, "time", clock)
    monkeypatch.setattr(fleet, "time", clock)
    return clock


@dataclass
class GatesDouble:
    """Opens once it has failed so often; keeps what it was told."""

    errors: list[Exception] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: list[tuple[str, bool]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def close(self, job: Job, _limits: Timeouts, shared: bool) -> Boundary:
        self.closed.append((job.name, shared))
        return Boundary("paused after collective 7 of gloo over ranks 0-1")

    async def open(self, job: Job, _limits: Timeouts) -> str:
        self.opened.append(job.name)
        if self.errors:
            raise self.errors.pop(0)
        return "2 communicators rebuilt"

    def forget(self, job: str) -> None:
        self.forgotten.append(job)


def with_gates(scene: Scene, *errors: Exception) -> GatesDouble:
    double = GatesDouble(list(errors))
    context = Parts(scene.fleet, scene.hosts, gates=double).context
    scene.context = context
    return double


def a_swap(scene: Scene, number: int) -> GpuSwap:
    order = Order(scene.job, scene.capsule, "h1", by="root", gpu=GpuAsked("h1", "5", ""))
    return GpuSwap(scene.context, number, order)


# ---- the gates of a job ------------------------------------------------------------------------


def test_the_hosts_of_a_job_are_asked_to_open_their_gates(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.RESUMING)

    async def act() -> None:
        assert await scene.context.reopen(move) == ""
        assert sorted(scene.hosts.said) == ["OpenGate h0", "OpenGate h1"]

    play(act())


def test_gates_wait_until_each_host_of_the_job_is_heard(scene: Scene, clock: Clock) -> None:
    """h2 has no capsule of it. A host that is silent for longer ends the move."""
    hosts = scene.fleet.hosts

    def heard(host: str, ago: float) -> None:
        hosts[host].heard = clock.now - ago

    async def act() -> None:
        heard("h0", 0.0)
        heard("h1", 0.5)
        heard("h2", 0.5)
        waits = asyncio.ensure_future(scene.context.until_heard(scene.job, NEVER))
        await asyncio.sleep(0.1)
        assert not waits.done()
        heard("h0", 0.0)
        heard("h1", 0.0)
        await waits
        heard("h0", -10.0)  # so long for this test
        heard("h1", 0.9)
        waits = asyncio.ensure_future(scene.context.until_heard(scene.job, NEVER))
        await asyncio.sleep(0.1)
        assert not waits.done()
        clock.now += 0.2
        with pytest.raises(Unreachable, match="h1 stopped answering"):
            await waits

    scene.job.newest = the_last(scene)
    play(act())


def test_gates_do_not_wait_for_ever_for_hosts_of_which_one_is_always_late(
    scene: Scene, clock: Clock
) -> None:
    """Each is heard within ``timeouts.suspicion``, but never all within two heartbeats."""
    scene.job.newest = the_last(scene)

    async def act(by: float) -> float:
        began = clock.now
        waits = asyncio.ensure_future(scene.context.until_heard(scene.job, began + by))
        late = 0
        while not waits.done():
            for n in range(2):
                scene.fleet.hosts[f"h{n}"].heard = clock.now - 0.3 * (n == late % 2)
            late += 1
            await asyncio.sleep(0.005)
            clock.now += 0.005
            assert clock.now - began < 5
        await waits
        return clock.now - began

    async def acts() -> None:
        assert 0.9 < await act(NEVER) < 3, "after suspicion"
        assert 0.1 < await act(0.2) < 0.8, "the deadline of a drain is near"
        assert await act(-1.0) < 0.1

    play(acts())


def test_a_job_without_a_snapshot_does_not_wait_for_heartbeats(scene: Scene) -> None:
    scene.fleet.hosts["h1"].heard = time.monotonic() - 0.5
    play(asyncio.wait_for(scene.context.until_heard(scene.job, NEVER), 0.2))


@pytest.mark.parametrize(
    ("job", "step", "holds", "shared"),
    [
        ("gpt", MigrationStep.FREEZING, True, True),
        ("gpt", MigrationStep.PRECOPYING, False, False),
        ("gpt", MigrationStep.DONE, True, False),
        ("bert", MigrationStep.FREEZING, True, False),
    ],
)
def test_gates_stay_shut_while_another_move_of_the_job_holds_them(
    scene: Scene, job: str, step: MigrationStep, holds: bool, shared: bool
) -> None:
    gates = with_gates(scene)
    move = scene.a_move(1, MigrationStep.FREEZING)
    move.holds_gates = True  # itself: that counts for no other
    scene.add_job("bert", 2)
    scene.a_move(2, step, scene.fleet.jobs[job], rank=0).holds_gates = holds

    async def act() -> None:
        await scene.context.quiesce(move)
        said = await scene.context.reopen(move)
        if shared:
            assert (said, gates.opened) == ("another move of the job holds them still", [])
        else:
            assert (said, gates.opened) == ("2 communicators rebuilt", ["gpt"])

    play(act())
    assert gates.closed == [("gpt", shared)]
    assert gates.forgotten == []


def test_where_a_boundary_lies_is_told_a_little_later(scene: Scene) -> None:
    """The job stands meanwhile, and the disk is slow."""
    with_gates(scene)
    move = scene.a_move(1, MigrationStep.QUIESCING)
    scene.fleet.journal.save_migration(1, move.row())

    async def act() -> None:
        words = await scene.context.quiesce(move)
        assert words == "paused after collective 7 of gloo over ranks 0-1"
        assert scene.told("boundary") == []
        await until_async(lambda: scene.told("boundary"))
        assert scene.told("boundary") == [(words, "root", "m1")]

    play(act())


def test_gates_that_do_not_open_are_asked_again_and_that_is_told_once(scene: Scene) -> None:
    gates = with_gates(scene, DOWN, DOWN, LiveshiftError("rank 1 aborted"), DOWN)
    move = scene.a_move(1, MigrationStep.RESUMING)

    async def act() -> None:
        assert await scene.context.reopen(move) == "2 communicators rebuilt"

    play(act())
    assert gates.opened == ["gpt"] * 5
    assert [text for text, _, _ in scene.told("moving")] == [
        f"the gates of gpt are not open yet: {error}" for error in (DOWN, "rank 1 aborted", DOWN)
    ]
    assert gates.forgotten == []


def test_other_work_goes_on_between_two_attempts_to_open_gates(scene: Scene) -> None:
    gates = with_gates(scene, *[DOWN] * 1000)
    move = scene.a_move(1, MigrationStep.RESUMING)

    async def act() -> None:
        asyncio.get_running_loop().call_soon(gates.errors.clear)  # the host is back
        await scene.context.reopen(move)

    play(act())
    assert len(gates.opened) <= 2


def test_gates_of_a_job_that_will_not_be_complete_again_are_forgotten(scene: Scene) -> None:
    gates = with_gates(scene, *[DOWN] * 3)
    move = scene.a_move(1, MigrationStep.RESUMING)
    scene.job.capsules["gpt/0"].code = 1

    async def act() -> None:
        assert await scene.context.reopen(move) == "the job has ended"

    play(act())
    assert (gates.opened, gates.forgotten) == (["gpt"], ["gpt"])


def test_gates_of_a_job_that_has_ended_are_not_opened(scene: Scene) -> None:
    gates = with_gates(scene)
    move = scene.a_move(1, MigrationStep.RESUMING)
    scene.job.state = "ended"

    async def act() -> None:
        assert await scene.context.reopen(move) == "the job has ended"

    play(act())
    assert (gates.opened, gates.forgotten) == ([], ["gpt"])


# ---- where else it could go --------------------------------------------------------------------


@pytest.mark.parametrize(("tried", "spare"), [("h2", "h0"), ("h0", "h2")])
def test_another_spare_is_one_that_was_not_tried(scene: Scene, tried: str, spare: str) -> None:
    move = scene.a_move(1, MigrationStep.RESTORING)
    move.destination = "h1"  # takes no slot of the others
    move.tried = {tried}
    assert scene.planner.another_spare(move) == spare
    move.tried = set()
    scene.a_move(2, MigrationStep.RESTORING, rank=0)
    scene.job.capsules["gpt/0"].host = "h1"  # so that h0 is empty, and h2 is not
    assert scene.planner.another_spare(move) == "h0"


# ---- what hosts say and ask --------------------------------------------------------------------


def claim(side: Side, epoch: int, ready: bool = True) -> messages.Claim:
    return messages.Claim("m1", "gpt/1", side.value, epoch, ready=ready)


def test_a_word_of_the_pre_copy_is_its_source_s_and_of_a_move_that_is_known(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.PRECOPYING)
    word = messages.Progressed("m1", 2, 100, 10, 5, 1e8)
    scene.migrations.progressed("h2", word)
    scene.migrations.progressed("h1", msgspec.structs.replace(word, migration="m9"))
    nothing = move.precopy
    assert nothing is None
    scene.migrations.progressed("h1", word)
    assert move.precopy is not None
    assert (move.precopy.round, move.precopy.bytes) == (2, 100)
    scene.fleet.migrations["m2"] = a_swap(scene, 2)
    scene.migrations.progressed("h1", msgspec.structs.replace(word, migration="m2"))


def test_a_move_under_way_is_ruled_by_where_it_is(scene: Scene) -> None:
    """What the journal has of it may be a little older."""
    scene.fleet.journal.save_migration(1, row(1, state="failed"))
    move = scene.a_move(1, MigrationStep.FREEZING)
    before = scene.written
    assert scene.claims.rule("h1", claim(Side.LEAVING, 1)) == messages.Ruled("wait", 1)
    assert scene.claims.rule("h2", claim(Side.COMING, 2)) == messages.Ruled("wait", 1)
    released = move.released
    assert not released
    move.step = MigrationStep.ROLLING_BACK
    assert scene.claims.rule("h1", claim(Side.LEAVING, 1, ready=False)).ruling == "wait"
    released = move.released
    assert not released, "it was not told to run"
    assert scene.claims.rule("h1", claim(Side.LEAVING, 1)).ruling == "run"
    assert move.released
    assert scene.written == before, "it had the grant, and its step was written down"


def test_a_destination_that_runs_releases_no_source(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.RESTORING)
    scene.context.commit(scene.capsule, "h2", still=True)
    before = scene.written
    assert scene.claims.rule("h2", claim(Side.COMING, 2)).ruling == "run"
    assert scene.written == before + 1, "the grant"
    assert scene.claims.rule("h2", claim(Side.COMING, 2)).ruling == "run"
    assert scene.written == before + 1, "once"
    assert not move.released


def test_a_copy_that_is_to_end_need_not_be_ready(scene: Scene) -> None:
    scene.context.commit(scene.capsule, "h2", still=True)
    assert scene.claims.rule("h0", claim(Side.COMING, 2, ready=False)).ruling == "end"


# ---- what is written down, and when ------------------------------------------------------------


def test_a_step_at_which_the_job_trains_is_written_at_once(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.PRECOPYING)
    scene.records.record(move)
    assert scene.state_of(1) == "pre-copying"


def test_a_step_at_which_the_job_stands_is_written_once_and_a_little_later(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.FREEZING)

    async def act() -> None:
        scene.records.record(move)
        move.step = MigrationStep.COMMITTED
        scene.records.record(move)
        assert scene.state_of(1) == "none", "the disk is not waited for"
        before = scene.written
        await until_async(lambda: scene.state_of(1) == "committed")
        await asyncio.sleep(3 * module.SOON_S)
        assert scene.written == before + 1
        move.step = MigrationStep.RESTORING
        scene.records.record(move)
        await until_async(lambda: scene.state_of(1) == "restoring")

    play(act())


def test_a_step_that_was_to_be_written_later_is_not_once_the_next_one_is(scene: Scene) -> None:
    move = scene.a_move(1, MigrationStep.FREEZING)

    async def act() -> None:
        scene.records.record(move)
        move.step = MigrationStep.ROLLING_BACK
        scene.records.record(move)
        assert scene.state_of(1) == "rolling back"
        before = scene.written
        await asyncio.sleep(5 * module.SOON_S)
        assert scene.written == before
        scene.claims.rule("h1", claim(Side.LEAVING, 1))
        assert scene.written == before, "nor again, before its source is told to run"

    play(act())


def test_a_swap_is_written_at_once_at_every_step(scene: Scene) -> None:
    swap = a_swap(scene, 1)
    swap.step = MigrationStep.FREEZING
    scene.records.record(swap)
    assert scene.state_of(1) == "freezing"


def test_the_end_of_a_swap_tells_of_no_copy(scene: Scene) -> None:
    swap = a_swap(scene, 1)
    swap.step = MigrationStep.DONE
    scene.records.record(swap)
    (told,) = scene.told("moved")
    assert told[0] == "moved h1 → h1 GPU 5: paused 0.00 s"


# ---- the last snapshot of a job ----------------------------------------------------------------


def the_last(scene: Scene) -> Generation:
    """A snapshot of the job as it is, which is being taken."""
    number = scene.fleet.journal.snapshots.begin_snapshot(scene.job.name)
    owners = {c.name: (c.host, c.epoch) for c in scene.job.capsules.values()}
    holders = {name: ["h2"] for name in owners}
    scene.job.taking = number
    return Generation(number, scene.job.name, "step 9", 5.0, 0, owners, holders)


def test_a_suspension_brings_the_memory_to_what_the_journal_says(scene: Scene) -> None:
    double, generation = with_gates(scene), the_last(scene)
    epochs = {c.name: c.epoch for c in scene.job.capsules.values()}
    scene.context.suspend(generation, "root wants it")
    job = scene.job
    assert (job.state, job.newest, job.taking, job.rewinds) == ("suspended", generation, 0, 1)
    for capsule in job.capsules.values():
        assert capsule.epoch > epochs[capsule.name]
        assert not capsule.granted
        assert capsule.seen is None
    assert double.forgotten == [job.name]
    journal = scene.fleet.journal
    assert [row[5] for row in journal.jobs()] == ["suspended"]
    rows = journal.capsules(job.name)
    assert {name: (host, epoch, granted) for name, _, _, host, epoch, _, granted in rows} == {
        c.name: (c.host, c.epoch, 0) for c in job.capsules.values()
    }
    assert journal.snapshots.newest(job.name) == generation


def test_a_job_is_not_suspended_while_one_of_its_capsules_moves(scene: Scene) -> None:
    double, generation = with_gates(scene), the_last(scene)
    swap = a_swap(scene, 7)
    scene.fleet.migrations[swap.name] = swap
    with pytest.raises(Refused, match=f"{swap.name} is under way: {scene.job.name} is not suspend"):
        scene.context.suspend(generation, "root wants it")
    assert (scene.job.state, scene.job.newest) == ("running", None)
    assert scene.fleet.journal.snapshots.newest(scene.job.name) is None
    assert double.forgotten == []


def test_a_suspension_that_cannot_be_written_changes_nothing_in_memory(scene: Scene) -> None:
    double, generation = with_gates(scene), the_last(scene)
    scene.fleet.journal.snapshots.give_up_snapshot(generation.number)
    before = {c.name: c.owner for c in scene.job.capsules.values()}
    with pytest.raises(LiveshiftError, match="is not being taken any more"):
        scene.context.suspend(generation, "root wants it")
    assert (scene.job.state, scene.job.newest, scene.job.rewinds) == ("running", None, 0)
    assert {c.name: c.owner for c in scene.job.capsules.values()} == before
    assert double.forgotten == []
