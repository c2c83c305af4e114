# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is taken, who keeps it, and what people and later orchestrators learn of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_scene import a_fleet
from orchestrator_parts import Parts
from snapshot_stage import SnapshotStage
from waits import until_async

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.messages import ProtectionRow
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.interval import SnapshotCost
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.orchestrator import protection as module
from liveshift.runtime.orchestrator.context import OrchestratorContext
from liveshift.runtime.orchestrator.fleet import Fleet
from liveshift.runtime.orchestrator.job_snapshots import JobSnapshots
from liveshift.runtime.orchestrator.protection import Protection
from liveshift.runtime.orchestrator.status import status
from liveshift.runtime.quiesce.gates import Boundary
from liveshift.runtime.snapshot.directory_images import DirectoryImages
from liveshift.runtime.snapshot.snapshot import Snapshot

OFTEN = "[snapshots]\nevery = 1\n[timeouts]\nsuspicion = 1\nheartbeat = 0.01\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "FIRST_S", 0.0)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


class Scene:
    """The job a, with a/0 on h0 and a/1 on h1, in a cluster whose third host is h2. Agents and
    gates are stand-ins."""

    def __init__(self, state: Path, more: str = OFTEN) -> None:
        self.state, self.more = state, more
        self.fleet = self._a_fleet()
        self.stage = Recorded(self.fleet)
        images = DirectoryImages(self.fleet.cluster, self._no_host)
        self.snapshots = JobSnapshots(self.fleet, self.stage, images)
        self.protection = Protection(self.fleet, self.stage, self.snapshots)

    async def _no_host(self, host: str, message: messages.Message, timeout: float) -> None:
        raise AssertionError("nothing is saved here")

    def _a_fleet(self) -> Fleet:
        fleet = a_fleet(self.state, self.more)
        for capsule in fleet.jobs["a"].capsules.values():
            capsule.started = True
        return fleet

    @property
    def job(self) -> Job:
        return self.fleet.jobs["a"]

    def row(self) -> ProtectionRow:
        (job,) = status(self.fleet, lambda job: job is self.job, sees_all=True).jobs
        found = job.protection
        assert found is not None
        return found

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.text) for event in self.fleet.journal.events("a", 0)]

    def run(self, *until: Callable[[], object], without: str = "") -> None:
        """Let it take snapshots until each of these has become true. All hosts but ``without``
        are up."""

        async def act() -> None:
            work = asyncio.create_task(self.protection.run())
            beats = asyncio.create_task(self._beat(without))
            for each in until:
                await until_async(each)
            work.cancel()
            beats.cancel()

        asyncio.run(act())

    async def _beat(self, without: str) -> None:
        while True:
            for name, host in self.fleet.hosts.items():
                host.heard = time.monotonic() - (1000.0 if name == without else 0.0)
            await asyncio.sleep(0.01)


class Recorded(SnapshotStage):
    """It also writes into the journal what is complete."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet

    def complete(self, generation: Generation) -> None:
        super().complete(generation)
        self.fleet.journal.snapshots.complete_snapshot(generation)
        job = self.fleet.jobs[generation.job]
        job.newest, job.taking = generation, 0


def a_move(scene: Scene) -> HostMigration:
    """A move of a/1 that is under way, of which nothing has been done yet."""
    order = Order(scene.job, scene.job.capsules["a/1"], "h2", "a test", "root")
    move = HostMigration(Parts(scene.fleet).context, 3, order)
    scene.fleet.migrations[move.name] = move
    return move


def both_may_hold(state: Path) -> Scene:
    """All capsules are on h0, so h1 and h2 can both hold. Snapshots are far apart."""
    scene = Scene(state, OFTEN.replace("every = 1", "every = 3600"))
    for capsule in scene.job.capsules.values():
        scene.fleet.journal.hand_over(capsule.name, "h0", capsule.epoch)
        capsule.host = "h0"
    return scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


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


def test_without_a_host_that_can_hold_it_a_job_is_unprotected_in_words(scene: Scene) -> None:
    scene.run(lambda: scene.job.unprotected, without="h2")
    assert "no host can hold its snapshots" in scene.row().why_not
    assert "h2 is not up" in scene.row().why_not
    assert [kind for kind, _ in scene.events()].count("unprotected") == 1
    assert scene.stage.said == []


def test_that_no_host_can_hold_it_is_said_before_the_first_snapshot_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_S", 3600.0)
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.events(), without="h2")
    assert [kind for kind, _ in scene.events()] == ["unprotected"]
    scene.run(lambda: not scene.job.unprotected)
    assert scene.row().why_not == "no snapshot is complete yet"
    assert scene.stage.said == [], "it is not due yet"


def test_as_soon_as_a_host_can_hold_it_a_job_is_protected(tmp_path: Path) -> None:
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.job.unprotected, without="h2")
    scene.run(lambda: scene.stage.completed)
    assert [kind for kind, _ in scene.events()] == ["unprotected", "protected"]
    assert (scene.row().why_not, scene.row().trouble) == ("", "")


def test_a_job_that_did_not_fit_is_unharmed_and_protected_once_it_does(scene: Scene) -> None:
    refusal = Refused("h2 cannot hold s1.1 of a/1", hint="it fits if snapshots.memory is 2 GB")
    scene.stage.fail("Hold a/1", refusal)
    scene.run(lambda: scene.job.unprotected)
    assert scene.row().why_not == f"{refusal} ({refusal.hint})"
    assert scene.events() == [("unprotected", f"not protected: {refusal} ({refusal.hint})")]
    assert not {"close gates", "LockCapsule a/0", "DumpCapsule a/0"} & set(scene.stage.said)
    scene.run(lambda: scene.stage.completed)
    assert scene.row().why_not == ""
    assert scene.events()[1:] == [("protected", "protected: a snapshot every 1 s, held by h2")]


def test_a_job_that_does_not_fit_is_noted_once_whatever_its_size(scene: Scene) -> None:
    sizes = [f"h2 cannot hold the image of a/1: it takes {n / 10} MB" for n in range(13, 500)]
    scene.stage.fail("Hold a/1", *map(Refused, sizes))
    scene.run(lambda: scene.job.unprotected.endswith("1.5 MB"))
    assert scene.row().why_not == sizes[2], "status has the newest size"
    assert scene.events() == [("unprotected", f"not protected: {sizes[0]}")]


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


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Fleet]:
    """Returns what gets an entry with each call of that method of a fleet."""
    calls: list[Fleet] = []
    method = getattr(Fleet, name)

    def counting(fleet: Fleet) -> object:
        calls.append(fleet)
        return method(fleet)

    monkeypatch.setattr(Fleet, name, counting)
    return calls


def test_protected_jobs_do_not_each_look_at_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of both, and they are looked at several times a second."""
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.stage.completed)
    monkeypatch.setattr(module, "FIRST_S", 3600.0)
    for n in range(50):
        other = replace(scene.job, name=f"b{n}")
        scene.fleet.jobs[other.name] = other
    looks = counted(monkeypatch, "views")
    scene.run(lambda: len(looks) >= 50)  # each of them, once
    looks.clear()
    ticks = counted(monkeypatch, "up")
    scene.run(lambda: len(ticks) > 20)
    assert looks == []
    assert len(scene.protection._states) == 51


def test_a_holder_of_the_same_failure_domain_is_not_taken(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    h0, *others = scene.fleet.cluster.hosts
    hosts = (h0, *(replace(host, domain="rack-1") for host in others))
    scene.fleet.cluster = replace(scene.fleet.cluster, hosts=hosts)
    scene.run(lambda: scene.job.unprotected)
    assert "h2 is in one failure domain with h1" in scene.row().why_not


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


def test_a_holder_that_is_lost_shows_at_once(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed)
    scene.run(lambda: any("not up" in text for _, text in scene.events()), without="h2")
    assert scene.row().why_not == "h2, which keeps s1, is not up"
    assert ("unprotected", "not protected: h2, which keeps s1, is not up") in scene.events()


def test_a_holder_that_is_lost_is_replaced_at_once(tmp_path: Path) -> None:
    scene = both_may_hold(tmp_path)
    scene.run(lambda: scene.stage.completed)
    assert scene.row().holders == ["h1", "h2"], "the images are spread"
    scene.run(lambda: len(scene.stage.completed) == 2, without="h2")
    assert scene.row().holders == ["h1"]
    assert [kind for kind, _ in scene.events()] == ["protected", "unprotected", "protected"]


def test_a_holder_that_was_switched_off_and_is_back_gets_the_next_snapshot_at_once(
    tmp_path: Path,
) -> None:
    """It is up, and perhaps nobody has missed it."""
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].lost = frozenset({"s1.1"})
    assert scene.row().why_not == "h2, which kept s1, has lost its memory since"
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert (scene.row().newest, scene.row().why_not) == ("s2", "")
    assert [kind for kind, _ in scene.events()] == ["protected", "unprotected", "protected"]


def test_a_host_that_a_job_has_left_for_its_links_holds_only_if_no_other_can(
    tmp_path: Path,
) -> None:
    scene = both_may_hold(tmp_path)
    snapshots = scene.snapshots
    for held in scene.fleet.hosts.values():
        held.heard = time.monotonic()
    assert snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h2"}
    scene.fleet.left_hosts.note(["h1"], [])
    assert snapshots.holders(scene.job) == {"a/0": "h2", "a/1": "h2"}
    scene.fleet.left_hosts.note(["h2"], [])
    assert snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h2"}


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


def test_a_holder_that_is_short_of_memory_is_replaced_at_once(tmp_path: Path) -> None:
    scene = both_may_hold(tmp_path)
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].memory_left = 0.04
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert scene.row().holders == ["h1"]
    assert scene.row().why_not == ""
    short = "not protected: h2, which keeps s1, is short of memory"
    assert ("unprotected", short) in scene.events()


def test_a_holder_that_alone_can_hold_keeps_what_it_has_until_it_needs_the_memory(
    scene: Scene,
) -> None:
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].memory_left = 0.04
    scene.run(lambda: "no host can hold" in scene.job.unprotected)
    assert "h2 is short of memory (4.0% is left)" in scene.job.unprotected
    assert (scene.row().newest, scene.row().why_not) == (
        "s1",
        "h2, which keeps s1, is short of memory",
    )
    scene.fleet.hosts["h2"].memory_left = 0.01
    scene.run(lambda: scene.job.newest is None)
    assert scene.fleet.journal.snapshots.newest("a") is None
    dropped = "not protected: s1 is dropped, h2 needs its memory for what runs there"
    assert ("unprotected", dropped) in scene.events()
    assert len(scene.stage.completed) == 1
    scene.fleet.hosts["h2"].memory_left = 0.5
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert scene.row().why_not == ""


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


def test_a_holder_that_gets_a_capsule_shows_at_once(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed)
    for host in scene.fleet.hosts.values():
        host.heard = time.monotonic()
    scene.job.capsules["a/1"].host = "h2"
    assert scene.row().why_not == "h2 keeps s1, and a/1 runs there"


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
