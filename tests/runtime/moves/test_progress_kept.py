# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator makes of a source's words about its progress, and of the moves before."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from journal_rows import row
from migration_stage import ANSWERS, Stage, a_move, no_waiting, play
from orchestrator_scene import brain, says

from liveshift.criu_glue.survey.found import Footprint
from liveshift.runtime import messages
from liveshift.runtime.cost.prediction import Load, besides_memory, predict, sharpened
from liveshift.runtime.messages import Progressed, Rounds
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves.planning import MigrationPlanner
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["brain", "no_waiting"]

WORD = Progressed("m7", 3, 2300, 48, 12, 6e8, 0.06, 0.3, 9e8)


def under_way(step: MigrationStep = MigrationStep.PRECOPYING) -> HostMigration:
    move = a_move(Stage())
    move.step = step
    move.predicted = predict(Load(Footprint(10**9, 0, 1, 1, 0)))
    return move


def test_the_last_word_is_kept_with_what_a_stop_takes_besides() -> None:
    move = under_way()
    move.progressed(WORD)
    assert move.predicted is not None
    stop: Any = pytest.approx(0.3 + besides_memory(move.predicted))
    assert move.row().precopy == Rounds(3, 2300, 48, 12, 6e8, 0.06, stop, 9e8)
    assert besides_memory(move.predicted) < move.predicted.seconds
    move.progressed(msgspec.structs.replace(WORD, round=4, delta_s=None))
    assert move.row().precopy == Rounds(4, 2300, 48, 12, 6e8, 0.06, None, 9e8)


@pytest.mark.parametrize(
    "step", [step for step in MigrationStep if step is not MigrationStep.PRECOPYING]
)
def test_a_word_that_comes_late_changes_nothing(step: MigrationStep) -> None:
    move = under_way(step)
    move.progressed(WORD)
    assert (move.precopy is None) == (step is not MigrationStep.QUIESCING)


def test_only_the_source_is_heard(brain: Orchestrator) -> None:
    move = under_way()
    brain.fleet.migrations["m7"] = move
    for host, word in (("h2", WORD), ("h1", msgspec.structs.replace(WORD, migration="m8"))):
        assert says(brain, host, word) is None
        assert move.precopy is None
    assert says(brain, "h1", WORD) is None
    assert move.precopy is not None
    brain.fleet.migrations["m7"] = cast(Any, object())  # a swap of GPUs has no pre-copy
    assert says(brain, "h1", WORD) is None


def test_both_outlive_the_orchestrator() -> None:
    move = under_way()
    move.progressed(WORD)
    raw = msgspec.msgpack.encode(move.row())
    kept = msgspec.msgpack.decode(raw, type=messages.MigrationRow)
    stage = Stage()
    again = HostMigration.from_row(stage, move.order, kept)
    assert (again.row().precopy, again.row().predicted) == (move.precopy, move.predicted)


def test_a_move_is_predicted_before_anything_is_done() -> None:
    stage = Stage()
    seen: list[tuple[list[str], float | None]] = []
    stage.record = lambda migration: seen.append(  # type: ignore[method-assign]
        (list(stage.said), migration.predicted.seconds if migration.predicted else None)
    )
    move = play(stage)
    look = cast(messages.Inspected, ANSWERS[messages.Inspect])
    assert move.row().predicted == predict(Load.of(look))
    assert seen[0] == (["Inspect h1", "Reserve h2"], predict(Load.of(look)).seconds)


def predicted(
    brain: Orchestrator, look: messages.Inspected, reserved: messages.Reserved
) -> messages.Prediction:
    """Of a move of a/1 to h2, that no wish and no deadline binds."""
    job = brain.fleet.jobs["a"]
    planner = MigrationPlanner(brain.fleet, cast(Any, None))
    return planner.predict(Order(job, job.capsules["a/1"], "h2"), look, reserved, None)


def test_plans_and_moves_learn_from_the_journal(brain: Orchestrator) -> None:
    look = msgspec.structs.replace(
        cast(messages.Inspected, ANSWERS[messages.Inspect]),
        footprint=Footprint(10**9, 0, 1, 1, 0),
        full_dump="not today",
    )
    reserved = cast(messages.Reserved, ANSWERS[messages.Reserve])
    first = predicted(brain, look, reserved)
    assert (first.learnt, first.why) == (0, "not today")
    slow = messages.Phase("dump", 0.0, 10 * first.seconds, None, True)
    for number in range(1, 4):
        made = msgspec.structs.replace(
            row(number, "a/1"), frozen_s=slow.seconds, phases=[slow], predicted=first
        )
        brain.fleet.journal.save_migration(number, made)
    taught = predicted(brain, look, reserved)
    assert taught.learnt == 3
    assert taught.seconds > 5 * first.seconds
    other = msgspec.structs.replace(look, full_dump="")
    fresh = predicted(brain, other, reserved)
    assert fresh.learnt == 0, "another way teaches nothing of this one"
    unable = msgspec.structs.replace(reserved, full_dump="not there either")
    assert predicted(brain, other, unable).why == "not there either"
    assert predicted(brain, look, unable).why == "not today"


def test_the_rounds_sharpen_what_was_predicted() -> None:
    stage = Stage()
    said: list[messages.Prediction | None] = []

    def changed(migration: Any) -> None:
        said.append(migration.predicted)
        if migration.step is MigrationStep.PRECOPYING:
            migration.progressed(WORD)

    stage.record = changed  # type: ignore[method-assign]
    move = play(stage)
    before, after = said[0], move.predicted
    assert before is not None
    assert after is not None
    assert move.precopy is not None
    assert after == sharpened(before, move.precopy) != before
