# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side of what a move costs: real fleet and journal, agents that a test speaks
for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from migration_service_scene import Scene, play
from waits import until_async

from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.messages import Cost, Phase, Worked
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves.costing import Costing

LEFT = Worked("collectives", 100.0, None, 100.0, 10.0, 0.0, 0.5, 246)
RUNS = Worked("collectives", 110.0, 130.0, 110.0, 10.0, 3.0, 0.4)
STAYS = Worked("collectives", 100.0, 130.0, 100.0, 10.0, 4.0, 0.5)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def costed(
    scene: Scene,
    step: MigrationStep,
    *answers: messages.Message | Exception,
    begin: bool = True,
    phases: tuple[Phase, ...] = (Phase("dump", 0.2, 0.5, None, True),),
    meanwhile: MigrationStep | None = None,
    frozen_s: float = 0.5,
) -> tuple[Cost | None, str]:
    """The cost of a move that ended so, and what the history says of it."""
    scene.hosts.answers[messages.StartMeasure] = [None]
    scene.hosts.answers[messages.EndMeasure] = list(answers)
    found: list[tuple[Cost | None, str]] = []

    async def act() -> None:
        costing = Costing(
            scene.fleet, scene.agents, lambda move, words: found.append((move.cost, words))
        )
        move = scene.a_move(1, MigrationStep.PREPARING)
        if begin:
            await costing.begin(move)
        move.step, move.capsule.migration = step, None
        move.times.phases += phases
        move.times.frozen_s = frozen_s
        move.times.end()
        if meanwhile is not None:
            scene.a_move(2, meanwhile, rank=0)
        await costing.end(move)

    play(act())
    return found[0] if found else (None, "")


def test_both_hosts_are_asked_and_the_rest_is_what_was_lost(scene: Scene) -> None:
    """3 s until the look, 30 collectives of 10 a second made: nothing lost; with 10 fewer, 1 s."""
    cost, words = costed(scene, MigrationStep.DONE, LEFT, RUNS, frozen_s=0.0)
    assert cost is not None
    assert cost.lost_s == pytest.approx(0.0, abs=0.1)
    assert [host for host, _ in scene.hosts.requests] == ["h1", "h1", "h2"]
    assert [ask.clock for ask in scene.hosts.sent(messages.EndMeasure)] == ["", "collectives"]
    assert words.startswith("cost 0.0 s of training: paused 0.0, slower 0.0; host empty after")


def test_no_less_was_lost_than_it_stood(scene: Scene) -> None:
    """The rate was taken for a little lower than it was: the job seems to have lost nothing."""
    cost, words = costed(scene, MigrationStep.DONE, LEFT, RUNS)
    assert cost is not None
    assert (cost.lost_s, cost.paused_s, cost.slower_s) == (0.5, 0.5, 0.0)
    assert words.startswith("cost 0.5 s of training: paused 0.5, slower 0.0; host empty after")


def test_the_pause_is_part_of_it_and_the_rest_is_slower(scene: Scene) -> None:
    fewer = Worked("collectives", 110.0, 120.0, 110.0, 10.0, 3.0, 0.4)
    cost, _ = costed(scene, MigrationStep.DONE, LEFT, fewer)
    assert cost is not None
    assert cost.lost_s == pytest.approx(1.0, abs=0.1)
    assert cost.paused_s == pytest.approx(0.5)
    assert cost.slower_s == pytest.approx(0.5, abs=0.1)
    assert (cost.cpu_source_s, cost.cpu_destination_s, cost.sent_bytes) == (0.5, 0.4, 246)
    assert cost.empty_s is not None


def test_one_that_was_undone_is_measured_where_it_runs_on(scene: Scene) -> None:
    cost, words = costed(scene, MigrationStep.FAILED, STAYS)
    assert cost is not None
    assert cost.lost_s == pytest.approx(1.0, abs=0.1)
    assert (cost.empty_s, cost.cpu_destination_s) == (None, None)
    assert words == "", "its line in the history says that it failed"
    assert [host for host, _ in scene.hosts.requests] == ["h1", "h1"]


def test_one_that_was_refused_costs_nothing(scene: Scene) -> None:
    assert costed(scene, MigrationStep.FAILED, STAYS, phases=(Phase("prepare", 0.0, 0.1),)) == (
        None,
        "",
    )
    assert [type(ask) for _, ask in scene.hosts.requests] == [messages.StartMeasure]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"meanwhile": MigrationStep.PREPARING},
            "another move of the job, m2, lies in the same time",
        ),
        ({"begin": False}, "was not there at its begin"),
    ],
)
def test_what_cannot_be_measured_says_so(scene: Scene, how: dict, why: str) -> None:  # type: ignore[type-arg]
    cost, words = costed(scene, MigrationStep.DONE, LEFT, RUNS, **how)
    assert cost is not None
    assert cost.lost_s is None
    assert why in cost.why_not
    assert words.startswith(f"cost not measured: {cost.why_not}; host empty after")


def test_a_job_that_ends_meanwhile(scene: Scene) -> None:
    scene.job.state = "ended"
    cost, _ = costed(scene, MigrationStep.DONE, LEFT, RUNS)
    assert cost is not None
    assert (cost.lost_s, cost.why_not) == (None, "the job ended")


def test_a_host_that_does_not_say(scene: Scene) -> None:
    cost, _ = costed(scene, MigrationStep.DONE, LEFT, Unreachable("h2 fell silent"))
    assert cost is not None
    assert cost.why_not == "a host did not say what the job made: h2 fell silent"


def test_a_move_is_over_before_its_cost_is_known(scene: Scene) -> None:
    """Evacuation goes on, and what waits for the move hears of it; the record comes later."""
    scene.hosts.answers[messages.EndMeasure] = [LEFT, RUNS]
    scene.hosts.answers[messages.StartMeasure] = [None]

    async def act() -> None:
        known = scene.hosts.held[messages.EndMeasure] = asyncio.Event()
        move = scene.a_move(1, MigrationStep.FINISHING)
        move.times.phases.append(Phase("dump", 0.2, 0.5, None, True))

        async def work() -> None:
            await scene.costing.begin(move)
            await move._end(MigrationStep.DONE)

        await scene.migrations._follow(move, work())
        assert scene.over == [move]
        row = scene.fleet.journal.migration(1)
        assert row is not None
        assert (row.state, row.cost) == ("done", None)
        known.set()
        await until_async(lambda: (seen := scene.fleet.journal.migration(1)) and seen.cost)
        assert [text.partition(":")[0] for text, _, _ in scene.told("cost")] == [
            "cost 0.0 s of training"
        ]
        assert isinstance(move, HostMigration)

    play(act())
