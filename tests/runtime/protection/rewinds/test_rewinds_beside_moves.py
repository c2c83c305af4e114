# SPDX-License-Identifier: Apache-2.0
"""A job loses a host while one of its capsules is moved: the job goes back to its snapshot at once,
unless the move may yet bring the lost capsule to run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from rewinds_scene import BRISK, RewindsScene

from liveshift.errors import LiveshiftError, Unreachable
from liveshift.launcher.show import moves
from liveshift.runtime import messages
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.steps import MigrationStep

SPARE = '[hosts.h3]\naddress = "10.88.0.13"\nslots = 4\n'
LOST = "goes back to s1: h1 is silent, and so is its kernel"
SILENT = Unreachable("h1 stopped answering")


class Scene(RewindsScene):
    """h3 is a spare, and the destination of moves. ``nccl``: communicators are down until all
    hosts of the job answer. ``copies``: what a host says of its copy of a move."""

    settings = f"{SPARE}{BRISK}"

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nccl = False
        self.copies: dict[str, str] = {}
        super().__init__(state, monkeypatch)
        for known in (self.alive, self.kernels):
            known.add("h3")
        for host in self.fleet.hosts.values():
            host.heard = time.monotonic()

    def move(self, capsule: str, step: MigrationStep) -> HostMigration:
        """m5, which moves a capsule to h3 and holds the gates of the job."""
        order = Order(self.job, self.job.capsules[capsule], "h3", "drain", "bob")
        move = HostMigration(self.parts.context, 5, order)
        move.step, move.holds_gates = step, True
        self.fleet.journal.save_migration(5, move.row())
        return move

    def follow(self, move: HostMigration, work: Coroutine[Any, Any, None]) -> None:
        """As the orchestrator does the work of a move."""
        self.parts.migrations._run(move, work)

    def grant_to(self, host: str, capsule: str, *, granted: bool = True) -> None:
        """Commit a capsule to a host, which may run it then."""
        found = self.job.capsules[capsule]
        self.parts.context.commit(found, host, still=True)
        if granted:
            self.fleet.journal.grant(capsule, host, found.epoch)
            found.granted = True

    def back(self, *hosts: str) -> None:
        self.alive |= set(hosts)
        self.kernels |= set(hosts)

    def state_of_the_move(self) -> str:
        row = self.fleet.journal.migration(5)
        assert row is not None
        return row.state

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        answer = await super().request(host, message, limit)
        if isinstance(message, messages.Settle):
            return messages.Settled(self.copies.get(host, "runs"))
        if isinstance(message, messages.Progress):
            return messages.Arrived(1000, 1000, True)
        if isinstance(message, messages.Resume):
            return messages.Moved(0, [])
        return answer

    async def open(self, job: Job, limits: object) -> str:
        gone = {capsule.host for capsule in job.capsules.values()} - self.alive
        if self.nccl and gone:
            raise Unreachable(f"communicators are down, and {', '.join(gone)} does not answer")
        return await super().open(job, limits)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def waits_for_a_peer(scene: Scene) -> HostMigration:
    """The move of a/0 is rolled back, and its gates cannot open while h1 is silent."""
    scene.nccl = True
    move = scene.move("a/0", MigrationStep.ROLLING_BACK)
    move.error = LiveshiftError("the freeze failed")
    scene.follow(move, move._end_undone())
    return move


def waits_for_both_sides(scene: Scene) -> HostMigration:
    """a/1 freezes on h1, to move to h3, and both are silent: perhaps its image is complete."""
    move = scene.move("a/1", MigrationStep.FREEZING)
    scene.follow(move, move._roll_back(SILENT, True))
    return move


def waits_where_it_may_run(scene: Scene) -> HostMigration:
    """a/1 came from h3 to h1, which was let run it."""
    move = scene.move("a/1", MigrationStep.COMMITTED)
    move.source, move.destination = "h3", "h1"
    scene.grant_to("h1", "a/1")
    scene.follow(move, move._from_commit())
    return move


def waits_before_it_runs(scene: Scene) -> HostMigration:
    """As before, but h1 was not let run it, and h3 is silent, too."""
    move = scene.move("a/1", MigrationStep.COMMITTED)
    move.source, move.destination = "h3", "h1"
    scene.grant_to("h1", "a/1", granted=False)
    scene.follow(move, move._from_commit())
    return move


def waits_for_a_snapshot(scene: Scene) -> HostMigration:
    """The move of a/0 is to close the gates, which a snapshot cannot open."""

    class Taken:
        name = "s7"
        released = asyncio.Event()
        locks = True

        def abandon(self, why: str, *, to_a_move: bool = False) -> None:
            self.why = why

    scene.fleet.snapshots["a"] = Taken()  # type: ignore[assignment]  # what a move needs of it
    move = scene.move("a/0", MigrationStep.PRECOPYING)

    async def quiesce() -> None:
        await move._quiesce()

    scene.follow(move, move._unless_cancelled(quiesce()))
    return move


@pytest.mark.parametrize(
    ("begin", "cut"),
    [
        (waits_for_a_peer, ["h1"]),
        (waits_for_both_sides, ["h1", "h3"]),
        (waits_where_it_may_run, ["h1"]),
        (waits_before_it_runs, ["h1", "h3"]),
        (waits_for_a_snapshot, ["h1"]),
    ],
)
def test_a_move_that_waits_for_a_lost_host_ends_with_the_rewind(
    scene: Scene, begin: Any, cut: list[str]
) -> None:
    async def play() -> HostMigration:
        async with scene.at_work():
            scene.cut(*cut)
            move: HostMigration = begin(scene)
            await scene.until(lambda: bool(scene.history("rewound")))
            await scene.until(lambda: not scene.parts.migrations._tasks._running)
            return move

    move = asyncio.run(play())
    assert LOST in scene.history("rewinding")
    assert (move.step, scene.state_of_the_move()) == (MigrationStep.REWOUND, "rewound")
    assert (move.capsule.migration, move.holds_gates, move.waits) == (None, False, "")
    assert scene.job.rewinds == 1
    assert {host for host, _, granted in scene.owners().values() if granted} == {"h0", "h2"}
    assert scene.said.count("open") == 1, "the rewind opens the gates, and nobody else"
    outcome = moves.outcome(move.row())
    assert outcome.startswith(f"the move of {move.capsule.name} {move.source} → ")
    assert outcome.endswith(f"is over: a {LOST}")
    with pytest.raises(LiveshiftError, match="goes back to s1"):
        moves.raise_if_failed(move.row())
    last = scene.fleet.journal.events("a", 0)
    assert [e.kind for e in last if e.subject == move.capsule.name][-1] == "not moved"


def test_a_move_goes_on_that_waited_for_a_host_which_was_away(scene: Scene) -> None:
    """Its kernel answers: its agent is restarted, say."""

    async def play() -> HostMigration:
        async with scene.at_work():
            scene.alive.remove("h1")
            move = waits_for_a_peer(scene)
            await scene.until(lambda: bool(move.waits))
            await asyncio.sleep(2.5)
            assert move.step is MigrationStep.ROLLING_BACK
            scene.back("h1")
            await scene.until(lambda: move.capsule.migration is None)
            return move

    assert asyncio.run(play()).step is MigrationStep.FAILED
    assert scene.job.rewinds == 0
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_while_no_rewind_is_possible_a_move_waits_on(scene: Scene) -> None:
    """The host may come back with the capsule, and then nothing of the job is repeated."""

    async def play() -> HostMigration:
        async with scene.at_work():
            scene.cut("h1", "h2")  # h2 has all images
            move = waits_where_it_may_run(scene)
            await scene.until(lambda: bool(scene.history("rewinding")))
            assert scene.history("rewinding")[0].startswith("waits: no host that holds")
            assert move.step is MigrationStep.RESTORING
            scene.back("h1")
            await scene.until(lambda: move.capsule.migration is None)
            return move

    assert asyncio.run(play()).step is MigrationStep.DONE
    assert scene.job.rewinds == 0
    assert scene.owners()["a/1"] == ("h1", 2, True)


def test_an_image_that_is_gone_ends_no_capsule_that_a_move_may_still_bring(scene: Scene) -> None:
    async def play() -> None:
        scene.images = False
        async with scene.at_work():
            scene.cut("h1", "h3")
            move = waits_before_it_runs(scene)
            await scene.until(lambda: bool(scene.history("rewinding")))
            assert move.capsule.code is None
            scene.back("h1")
            await scene.until(lambda: move.step in (MigrationStep.FINISHING, MigrationStep.DONE))

    asyncio.run(play())
    assert scene.owners()["a/1"][0] == "h1"
    assert scene.job.state == "running"


EARLY = [MigrationStep.PREPARING, MigrationStep.PRECOPYING, MigrationStep.QUIESCING]
LATE = [
    MigrationStep.FREEZING,
    MigrationStep.COMMITTED,
    MigrationStep.RESTORING,
    MigrationStep.RESUMING,
    MigrationStep.FINISHING,
]


@pytest.mark.parametrize(
    ("capsule", "step"),
    [
        # Another host of the job is lost: what the move saves is undone all the same.
        *(("a/0", step) for step in EARLY + LATE),
        ("a/0", MigrationStep.ROLLING_BACK),
        ("a/0", MigrationStep.RETURNING),
        # Its source is lost: the destination has no complete image yet.
        *(("a/1", step) for step in EARLY),
    ],
)
def test_a_move_that_cannot_save_what_is_lost_ends_with_the_rewind(
    scene: Scene, capsule: str, step: MigrationStep
) -> None:
    """It could go on for minutes yet: over a slow link, or to a boundary that never comes."""

    async def play() -> HostMigration:
        async with scene.at_work():
            move = scene.move(capsule, step)
            if step in LATE and step is not MigrationStep.FREEZING:
                scene.grant_to("h3", capsule, granted=step not in LATE[1:3])
            move.holds_gates = False  # else the host would have to be silent for longer
            scene.follow(move, asyncio.sleep(3600))
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))
            return move

    move = asyncio.run(play())
    assert LOST in scene.history("rewinding")
    assert (move.step, scene.state_of_the_move()) == (MigrationStep.REWOUND, "rewound")
    assert (move.capsule.migration, scene.job.rewinds) == (None, 1)
    assert {"EndEarlier h0", "EndEarlier h3"} <= set(scene.said), "on both sides of the move"
    assert all(granted for _, _, granted in scene.owners().values())


def test_a_rank_that_dies_ends_a_move_of_another_one_that_freezes(scene: Scene) -> None:
    async def play() -> HostMigration:
        async with scene.at_work():
            move = scene.move("a/0", MigrationStep.FREEZING)
            scene.follow(move, asyncio.sleep(3600))
            assert scene.report(scene.end("a/1", 137, 9))
            await scene.until(lambda: bool(scene.history("rewound")))
            return move

    assert asyncio.run(play()).step is MigrationStep.REWOUND


def test_a_move_that_goes_on_comes_to_its_end_before_the_job_goes_back(scene: Scene) -> None:
    """Its source is silent, but still sends to the destination, say: then nothing is lost."""

    async def play() -> HostMigration:
        async with scene.at_work():
            scene.cut("h1")
            move = scene.move("a/1", MigrationStep.FREEZING)
            more = asyncio.Event()

            async def sends() -> None:
                await more.wait()
                await move._roll_back(SILENT, True)

            scene.follow(move, sends())
            await scene.until(lambda: bool(scene.rewinds.why_again(scene.job)))
            await asyncio.sleep(0.3)
            assert scene.job.rewinds == 0
            more.set()
            await scene.until(lambda: move.capsule.migration is None)
            return move

    assert asyncio.run(play()).step is MigrationStep.DONE
    assert scene.owners()["a/1"] == ("h3", 2, True)
    assert scene.job.rewinds == 0


def test_an_orchestrator_that_dies_in_the_rewind_leaves_no_move_under_way(scene: Scene) -> None:
    async def dies() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            scene.cut("h1")
            waits_where_it_may_run(scene)
            await scene.until(lambda: scene.job.state == "rewinding")
            assert scene.fleet.journal.migrations_under_way() == []

    async def goes_on() -> None:
        scene.stuck = set()
        async with scene.at_work():
            scene.parts.migrations.recover()
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(dies())
    assert {"EndEarlier h0", "EndEarlier h3"} <= set(scene.said), "h3 has the frozen copy"
    scene.begin(Fleet(scene.fleet.cluster))
    asyncio.run(goes_on())
    assert scene.state_of_the_move() == "rewound"
    assert {host for host, _, granted in scene.owners().values() if granted} == {"h0", "h2"}


def test_a_rewind_that_cannot_be_written_leaves_the_move_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> HostMigration:
        journal, tries = scene.fleet.journal, []

        def fails(*_: object) -> None:
            tries.append(1)
            raise LiveshiftError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(journal, "end_migration", fails)
            async with scene.at_work():
                scene.cut("h1")
                move = waits_where_it_may_run(scene)
                await scene.until(lambda: len(tries) > 1)
                assert move.step is MigrationStep.RESTORING
                assert (scene.job.rewinds, journal.snapshots.rewinds("a")) == (0, 0)
                scene.back("h1")
                await scene.until(lambda: move.capsule.migration is None)
                return move

    assert asyncio.run(play()).step is MigrationStep.DONE


def test_a_person_may_order_a_rewind_beside_a_move_that_waits(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            move = scene.move("a/0", MigrationStep.PRECOPYING)
            scene.follow(move, asyncio.sleep(3600))
            with pytest.raises(LiveshiftError, match="m5 is under way"):
                scene.rewinds.order("bob", scene.job, "", dry_run=True)
            move.waits = "h1"
            scene.rewinds.order("bob", scene.job, "", dry_run=True)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("step", "refused"), [(MigrationStep.PRECOPYING, False), (MigrationStep.FREEZING, True)]
)
def test_a_person_who_knows_a_host_to_be_dead_need_not_wait_for_a_move_that_saves_nothing(
    scene: Scene, step: MigrationStep, refused: bool
) -> None:
    scene.stuck = {"GetHeld"}  # no rewind begins by itself

    async def play() -> None:
        async with scene.at_work():
            scene.follow(scene.move("a/1", step), asyncio.sleep(3600))
            scene.cut("h1")
            await scene.until(lambda: not scene.rewinds._lookout.answers("h1"))
            if not refused:
                scene.rewinds.order("bob", scene.job, "h1", dry_run=True)
                return
            with pytest.raises(LiveshiftError, match="m5 is under way"):
                scene.rewinds.order("bob", scene.job, "h1", dry_run=True)

    asyncio.run(play())


def test_the_frozen_copy_of_a_move_that_a_rewind_ends_takes_no_slot(scene: Scene) -> None:
    move = waits = scene.move("a/1", MigrationStep.RESTORING)
    scene.fleet.migrations["m5"] = move
    waits.source, waits.destination = "h3", "h1"
    used = {view.name: view.used for view in scene.fleet.views()}
    left = {view.name: view.used for view in scene.fleet.views(scene.job)}
    assert (used["h3"], left["h3"]) == (1, 0)
    assert left["h1"] == used["h1"] == 1
