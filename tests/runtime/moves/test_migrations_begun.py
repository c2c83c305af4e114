# SPDX-License-Identifier: Apache-2.0
"""How moves begin, are planned, and are taken up by an orchestrator that was restarted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gpu_lists import ONE, UUIDS, survey
from journal_rows import row
from migration_service_scene import RESERVED, SEATS, Answer, Scene, play
from migration_stage import FACTS, PAIRS, SURVEY
from waits import until_async

from liveshift.criu_glue.survey.found import NeededFile
from liveshift.errors import NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.messages import MigrationRow, Part, Phase, Prediction, Rounds
from liveshift.runtime.migration.gpu_swap import GpuSwap
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.gpu_asked import GpuAsked
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import migration_service as module


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def order(scene: Scene, to: str, **wishes: Any) -> Order:
    return Order(scene.job, scene.capsule, to, by="root", **wishes)


# ---- how one begins ----------------------------------------------------------------------------


def test_a_move_is_written_down_told_and_on_its_way_when_it_has_begun(scene: Scene) -> None:
    async def act() -> None:
        asked = scene.hosts.held[messages.Inspect] = asyncio.Event()
        move = scene.migrations.start(order(scene, "h2", reason="ECC errors", verify=True))
        assert (move.name, move.way, move.order.verify) == ("m1", ("h1", "h2"), True)
        assert move.order.gpu is None
        assert scene.state_of(1) == "preparing"
        assert scene.told("move") == [("m1 begins: h1 → h2 (as asked): ECC errors", "root", "m1")]
        assert scene.capsule.migration == "m1"
        assert scene.fleet.migrations == {"m1": move}
        with pytest.raises(Refused, match=r"gpt/1 is moving already \(m1\)"):
            scene.migrations.start(order(scene, "h2"))
        await until_async(lambda: scene.hosts.said == ["Inspect h1"])
        assert scene.over == []
        scene.hosts.answers[messages.Inspect] = [Refused("it cannot move")]
        asked.set()
        await until_async(lambda: scene.over == [move])
        assert (move.step, str(move.error)) == (MigrationStep.FAILED, "it cannot move")
        assert scene.hosts.said == ["Inspect h1", "Settle h1", "Settle h2"]
        capsule = scene.job.capsules["gpt/1"]
        assert (scene.state_of(1), capsule.migration) == ("failed", None)
        again = scene.migrations.start(order(scene, ""))
        assert (again.name, again.order.verify) == ("m2", False)
        assert again.destination == "h0", "another than the one that has just failed"

    play(act())


def test_a_gpu_that_was_asked_for_is_the_one_that_its_host_has(scene: Scene) -> None:
    scene.fleet.hosts["h2"].gpus = SEATS

    async def act() -> None:
        scene.hosts.held[messages.Inspect] = asyncio.Event()
        with pytest.raises(NotFound, match='h2 has no GPU "7"'):
            scene.migrations.start(order(scene, "h2", gpu=GpuAsked("h2", "7", "")))
        assert (scene.capsule.migration, scene.fleet.migrations) == (None, {})
        move = scene.migrations.start(order(scene, "h2", gpu=GpuAsked("h2", "1", "GPU-a")))
        assert move.order.gpu == GpuAsked("h2", "GPU-y", "GPU-a")

    play(act())


def test_a_swap_begins_as_a_move_does(scene: Scene) -> None:
    scene.fleet.hosts["h1"].gpus = SEATS
    scene.hosts.answers[messages.LookAtGpus] = [Refused("GPU 1 has no room")]

    async def act() -> None:
        def start(gpu: str, verify: bool = False) -> Migration:
            asked = GpuAsked("h1", gpu, "0")
            return scene.migrations.start(
                order(scene, "", reason="XID 79", gpu=asked, verify=verify)
            )

        with pytest.raises(NotFound, match='h1 has no GPU "7"'):
            start("7")
        assert (scene.capsule.migration, scene.fleet.migrations) == (None, {})
        swap = start("1", verify=True)
        assert isinstance(swap, GpuSwap)
        assert swap.order.verify
        assert scene.told("move") == [("m1 begins: h1 → h1 GPU 1 (as asked): XID 79", "root", "m1")]
        with pytest.raises(Refused, match=r"gpt/1 is moving already \(m1\)"):
            start("1")
        await until_async(lambda: scene.over == [swap])
        assert scene.hosts.sent(messages.LookAtGpus) == [messages.LookAtGpus("gpt/1", "1", "0")]
        assert (swap.step, scene.capsule.migration) == (MigrationStep.FAILED, None)
        scene.fleet.hosts["h1"].gpus = ()  # its beats tell of none: it is asked itself
        assert not start("7").order.verify

    play(act())


def test_moves_that_ended_long_ago_are_not_kept_at_hand(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_MIGRATIONS", 2)
    for number in (1, 2, 3):
        scene.a_move(number, MigrationStep.DONE)
    scene.capsule.migration = None
    scene.hosts.answers[messages.Inspect] = [Refused("it cannot move")]

    async def act() -> None:
        scene.migrations.start(order(scene, "h2"))
        await until_async(lambda: scene.over)

    scene.fleet.journal.skip_migrations(3)
    play(act())
    assert sorted(scene.fleet.migrations) == ["m3", "m4"]


# ---- what a plan says --------------------------------------------------------------------------


def planned(scene: Scene, to: str = "h2", gpu: GpuAsked | None = None) -> messages.Planned:
    found: list[messages.Planned] = []

    async def act() -> None:
        before = scene.written
        found.append(await scene.planner.plan(order(scene, to, gpu=gpu)))
        assert scene.written == before, "nothing is changed"
        assert (scene.capsule.migration, scene.fleet.migrations) == (None, {})

    play(act())
    return found[0]


def test_a_plan_tells_what_a_move_would_find(scene: Scene) -> None:
    plan = planned(scene)
    assert (plan.capsule, plan.source, plan.destination) == ("gpt/1", "h1", "h2")
    assert plan.checks == [("destination", "h2, as asked"), ("CRIU", "4.2.1")]
    assert (plan.image_bytes, plan.carried_bytes) == (320, 5)
    assert plan.prediction is not None
    assert (plan.prediction.way, plan.prediction.learnt) == ("pre-copy", 0)
    assert scene.hosts.said == ["Inspect h1", "Reserve h2"]
    assert scene.hosts.sent(messages.Inspect)[0].watch, "what it writes is seen"
    (reserve,) = scene.hosts.sent(messages.Reserve)
    assert (reserve.migration, reserve.source, reserve.epoch) == ("plan", "h1", 2)
    assert reserve.dry_run, "no room is made"
    assert reserve.gpus_wanted == []


def test_a_plan_warns_of_what_breaks_and_of_what_failed_before(scene: Scene) -> None:
    look = messages.Inspected(SURVEY, FACTS, 5, outside=["203.0.113.5:443"])
    scene.hosts.answers[messages.Inspect] = [look]
    scene.capsule.failed = "its last move from here, m3, failed: dump: no"
    assert planned(scene).checks[2:] == [
        ("warning", "breaks a connection to outside the cluster: 203.0.113.5:443"),
        ("warning", "its last move from here, m3, failed: dump: no"),
    ]


def test_a_plan_looks_again_before_a_file_that_has_gone_stands_in_the_way(scene: Scene) -> None:
    log = NeededFile("/data/log", -1, "", inode=7)
    looks: list[Answer] = [
        messages.Inspected(replace(SURVEY, needed=needed), FACTS, 5) for needed in ((log,), ())
    ]
    scene.hosts.answers[messages.Inspect] = looks
    scene.hosts.answers[messages.Reserve] = [Refused("h2 lacks /data/log"), RESERVED]
    assert planned(scene).checks[-1] == ("CRIU", "4.2.1")
    assert scene.hosts.said == ["Inspect h1", "Reserve h2"] * 2
    watched = [ask.watch for ask in scene.hosts.sent(messages.Inspect)]
    assert watched == [True, False], "what it writes was seen the first time"
    assert [ask.survey.needed for ask in scene.hosts.sent(messages.Reserve)] == [(log,), ()]


def test_a_plan_asks_for_the_gpu_that_was_named(scene: Scene) -> None:
    look = messages.Inspected(SURVEY, FACTS, 5, gpu=survey(ONE))
    scene.hosts.answers[messages.Inspect] = [look]
    scene.fleet.hosts["h2"].gpus = SEATS
    planned(scene, gpu=GpuAsked("h2", "1", ""))
    (reserve,) = scene.hosts.sent(messages.Reserve)
    assert reserve.gpus_wanted == [(UUIDS[1], "GPU-y")]


@pytest.mark.parametrize("who", ["the source", "the destination"])
def test_memory_that_cannot_go_ahead_is_reckoned_with(scene: Scene, who: str) -> None:
    look = messages.Inspected(SURVEY, FACTS, 5)
    if who == "the source":
        scene.hosts.answers[messages.Inspect] = [msgspec.structs.replace(look, full_dump="no")]
    else:
        reserved = msgspec.structs.replace(RESERVED, full_dump="no")
        scene.hosts.answers[messages.Reserve] = [reserved]
    prediction = planned(scene).prediction
    assert prediction is not None
    assert (prediction.way, prediction.why) == ("full dump", "no")


def test_a_plan_learns_from_the_moves_of_its_own_job(scene: Scene) -> None:
    def moved(number: int, capsule: str, seconds: float) -> MigrationRow:
        predicted = Prediction("pre-copy", "", 0.1, [Part("dump", 0.1, 10, "", 0.1)], 10)
        phases = [Phase("dump", 0.0, seconds, 10, True)]
        return msgspec.structs.replace(
            row(number, capsule),
            frozen_s=seconds,
            phases=phases,
            predicted=predicted,
            precopy=Rounds(1, 10, 0, 0, 1e8),
        )

    for number, (capsule, seconds) in enumerate((("gpt/0", 0.2), ("bert/1", 2.0)), 1):
        scene.fleet.journal.save_migration(number, moved(number, capsule, seconds))
    prediction = planned(scene).prediction
    assert prediction is not None
    assert prediction.learnt == 1
    (dump,) = [part for part in prediction.parts if part.name == "dump"]
    assert dump.seconds is not None
    assert dump.seconds / (dump.untaught or 0) == pytest.approx(2.0)


def test_a_plan_of_a_swap_tells_what_its_host_found(scene: Scene) -> None:
    found = messages.SwapPlan("GPU 3", "GPU 5", PAIRS, [1001], 80, [("GPU", "H200")])
    scene.hosts.answers[messages.LookAtGpus] = [found]

    async def act() -> None:
        plan = await scene.planner.plan(order(scene, "", gpu=GpuAsked("h1", "5", "3")))
        assert plan == messages.Planned(
            "gpt/1", "h1 GPU 3", "h1 GPU 5", [("GPU", "H200")], image_bytes=0, carried_bytes=0
        )
        assert scene.hosts.requests == [("h1", messages.LookAtGpus("gpt/1", "5", "3"))]
        scene.capsule.code = 0
        with pytest.raises(Refused, match="gpt/1 has ended"):
            await scene.planner.plan(order(scene, "", gpu=GpuAsked("h1", "5", "3")))

    play(act())


# ---- how an orchestrator that was restarted goes on --------------------------------------------


def left(
    scene: Scene, state: str, host: str = "h1", epoch: int = 1, to: str = "h2"
) -> HostMigration:
    """What is made of a move h1 → ``to`` whose row and owner were left so."""
    under_way = msgspec.structs.replace(row(1, state=state), destination=to)
    scene.fleet.journal.save_migration(1, under_way)
    scene.capsule.host, scene.capsule.epoch = host, epoch
    scene.migrations.recover()
    move = scene.fleet.migrations["m1"]
    assert isinstance(move, HostMigration)
    return move


def test_what_was_not_committed_is_undone(scene: Scene) -> None:
    async def act() -> None:
        move = left(scene, "preparing")
        assert (move.name, move.step, move.way) == ("m1", MigrationStep.PREPARING, ("h1", "h2"))
        assert scene.capsule.migration == "m1"
        said = "the orchestrator was restarted while it was preparing"
        assert scene.told("moving") == [(said, "root", "m1")]
        await until_async(lambda: scene.over == [move])
        assert scene.hosts.said == ["Settle h1", "Settle h2"]
        capsule = scene.job.capsules["gpt/1"]
        assert (scene.state_of(1), capsule.migration) == ("failed", None)

    play(act())


@pytest.mark.parametrize(
    ("state", "host", "epoch", "step", "destination"),
    [
        ("freezing", "h1", 1, MigrationStep.FREEZING, "h2"),
        ("freezing", "h2", 2, MigrationStep.COMMITTED, "h2"),
        ("rolling back", "h2", 2, MigrationStep.COMMITTED, "h2"),
        ("restoring", "h2", 2, MigrationStep.RESTORING, "h2"),
        ("returning", "h2", 2, MigrationStep.RETURNING, "h2"),
        ("returning", "h1", 3, MigrationStep.RETURNING, "h2"),
        ("restoring", "h0", 4, MigrationStep.RESTORING, "h0"),
    ],
)
def test_who_owns_the_capsule_tells_more_than_the_last_row(
    scene: Scene, state: str, host: str, epoch: int, step: MigrationStep, destination: str
) -> None:
    """A commit is written at once, the steps after it a little later."""

    async def act() -> None:
        move = left(scene, state, host, epoch)
        assert (move.step, move.source, move.destination) == (step, "h1", destination)

    play(act())


def test_a_swap_that_was_under_way_is_asked_for_at_its_host(scene: Scene) -> None:
    swap = msgspec.structs.replace(
        row(1, state="freezing"), source="h1 GPU 3", destination="h1 GPU 5", kind="swap"
    )
    scene.fleet.journal.save_migration(1, swap)

    async def act() -> None:
        scene.migrations.recover()
        taken = scene.fleet.migrations["m1"]
        assert isinstance(taken, GpuSwap)
        assert taken.way == ("h1 GPU 3", "h1 GPU 5")
        await until_async(lambda: scene.over == [taken])
        assert sorted(scene.hosts.said) == ["OpenGate h0", "OpenGate h1", "SettleSwap h1"]
        assert scene.state_of(1) == "failed"

    play(act())


def test_a_move_of_a_job_that_has_gone_is_over_and_the_next_is_taken_up(scene: Scene) -> None:
    scene.fleet.journal.save_migration(1, row(1, "bert/1", "freezing"))
    scene.fleet.journal.save_migration(2, row(2, state="preparing"))
    scene.fleet.journal.save_migration(3, row(3, "gpt/0", "done"))

    async def act() -> None:
        scene.migrations.recover()
        assert list(scene.fleet.migrations) == ["m2"]

    play(act())
    gone = scene.fleet.journal.migration(1)
    assert gone is not None
    assert gone.state == "job ended"
    assert gone.error == "the job of bert/1 ended while no orchestrator ran"


def test_hosts_get_a_while_to_report_before_a_move_is_taken_up(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "[timeouts]\nsuspicion = 8\nheartbeat = 1\n")
    for host in ("h1", "h2"):
        scene.fleet.hosts[host].heard = 0.0

    async def act() -> None:
        move = left(scene, "preparing")
        await asyncio.sleep(0.1)
        scene.hear("h1")
        await asyncio.sleep(0.3)
        assert scene.hosts.requests == [], "h2 is away still"
        scene.hear("h2")
        came = time.monotonic()
        await until_async(lambda: scene.over == [move])
        assert time.monotonic() - came < 5, "it goes on once both are back"

    play(act())


def test_a_host_that_stays_away_is_not_waited_for_without_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "[timeouts]\nsuspicion = 0.6\nheartbeat = 0.05\n")
    scene.fleet.hosts["h2"].heard = 0.0

    async def act() -> None:
        began = time.monotonic()
        left(scene, "preparing")
        await until_async(lambda: scene.hosts.requests)
        assert time.monotonic() - began >= 1.2, "twice as long as until a host counts as lost"

    play(act())


# ---- what a plan remembers of the move before --------------------------------------------------

LAST_FAILED = "its last move from here, m1, failed"


@pytest.mark.parametrize(
    ("step", "error", "remembered"),
    [
        (MigrationStep.FAILED, StepFailed("dump", "no"), f"{LAST_FAILED}: dump: no"),
        (MigrationStep.FAILED, StepFailed("restore", "n"), f"{LAST_FAILED}: restore: n"),
        (MigrationStep.FAILED, StepFailed("ship", "no"), "the one before"),
        (MigrationStep.FAILED, Refused("no"), "the one before"),
        (MigrationStep.FAILED, None, "the one before"),
        (MigrationStep.DONE, None, ""),
        (MigrationStep.DONE, StepFailed("dump", "no"), ""),
    ],
)
def test_a_dump_or_restore_that_failed_is_remembered_until_it_has_moved(
    scene: Scene, step: MigrationStep, error: StepFailed | None, remembered: str
) -> None:
    move = scene.a_move(1, step)
    move.error, scene.capsule.failed = error, "the one before"
    scene.records.record(move)
    assert scene.capsule.failed == remembered
