# SPDX-License-Identifier: Apache-2.0
"""Which migrations of a job a rewind lets come to their end, and that no gates are closed while a
host of the job may be lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from migration_stage import Stage, a_move, a_swap

from liveshift.errors import StepFailed, Unreachable
from liveshift.runtime.migration.before_pause import ENDING_S
from liveshift.runtime.migration.beside_rewinds import going_on
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.model.steps import ENDS, MigrationStep

MOVED, OTHER = "gpt/1", "gpt/0"
SAVING = (
    MigrationStep.FREEZING,
    MigrationStep.COMMITTED,
    MigrationStep.RESTORING,
    MigrationStep.RETURNING,
)
UNDER_WAY = [step for step in MigrationStep if step not in ENDS]


def a_move_at(step: MigrationStep) -> Migration:
    move = a_move(Stage())
    move.step = step
    return move


@pytest.mark.parametrize("step", UNDER_WAY)
def test_one_that_may_save_what_is_lost_goes_on(step: MigrationStep) -> None:
    """In all other steps no host but the lost one has the capsule, or has it running."""
    move = a_move_at(step)
    assert going_on([move], {MOVED}) == ([move] if step in SAVING else [])


@pytest.mark.parametrize("lost", [(), (OTHER,), (OTHER, MOVED)])
@pytest.mark.parametrize("step", UNDER_WAY)
def test_one_that_saves_not_all_is_ended(step: MigrationStep, lost: tuple[str, ...]) -> None:
    """What it saves is undone all the same; nothing is lost if a person wants the rewind."""
    assert going_on([a_move_at(step)], lost) == []


def test_two_may_save_all_together() -> None:
    one, other = a_move_at(MigrationStep.FREEZING), a_move_at(MigrationStep.RESTORING)
    other.capsule, other.name = other.job.capsules[OTHER], "m8"
    assert going_on([one, other], {MOVED, OTHER}) == [one, other]
    other.step = MigrationStep.PRECOPYING
    assert going_on([one, other], {MOVED, OTHER}) == []
    assert going_on([one, other], {MOVED}) == [one]


@pytest.mark.parametrize("step", SAVING)
def test_one_that_waits_saves_nothing_meanwhile(step: MigrationStep) -> None:
    move = a_move_at(step)
    move.waits = "h2"
    assert going_on([move], {MOVED}) == []


@pytest.mark.parametrize("complete", [True, False])
def test_one_that_is_rolled_back_goes_on_if_its_image_may_be_complete(complete: bool) -> None:
    stage = Stage()
    stage.fail("Settle h1", Unreachable("h1 is silent"))
    move, found = a_move(stage), []

    class Asked(Exception):
        pass

    async def settle(host: str) -> str:
        found.extend(going_on([move], {MOVED}))
        raise Asked

    move._settle_copy = settle  # type: ignore[method-assign]
    move.step = MigrationStep.QUIESCING
    stage.fail("Progress", None)

    async def play() -> None:
        work = asyncio.ensure_future(move._roll_back(StepFailed("freeze", "no"), complete))
        while not found and not work.done():
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})

    asyncio.run(play())
    assert found == ([move] if complete else [])


@pytest.mark.parametrize("step", UNDER_WAY)
def test_one_that_an_earlier_orchestrator_has_left_goes_on_like_any_other(
    step: MigrationStep,
) -> None:
    """Until both hosts are up it does nothing. Perhaps its image is complete, and the only one."""
    row = a_move_at(step).row()
    left = a_move(stage := Stage())
    again = HostMigration.from_row(stage, left.order, row)
    saves = step in (*SAVING, MigrationStep.ROLLING_BACK)
    assert going_on([again], {MOVED}) == ([again] if saves else [])


@pytest.mark.parametrize("lost", [(), (OTHER,), (MOVED,)])
def test_a_swap_at_which_the_host_works_comes_to_its_end(lost: tuple[str, ...]) -> None:
    swap = a_swap(Stage())
    for step in (MigrationStep.PREPARING, MigrationStep.QUIESCING, MigrationStep.RESUMING):
        swap.step = step
        assert going_on([swap], lost) == []
    swap.step = MigrationStep.FREEZING
    assert going_on([swap], lost) == [swap]
    swap.waits = "h1"
    assert going_on([swap], lost) == []


def test_no_gates_are_closed_while_a_host_of_the_job_is_not_heard() -> None:
    stage = Stage()
    stage.fail("until_heard", Unreachable("h0 stopped answering"))
    move = a_move(stage)
    asyncio.run(move.run())
    assert (stage.gates, move.step) == ([], MigrationStep.FAILED)
    assert MigrationStep.QUIESCING not in stage.steps


@pytest.mark.parametrize("in_s", [None, 30.0])
def test_a_deadline_leaves_no_time_to_wait_for_heartbeats(in_s: float | None) -> None:
    stage = Stage()
    until = None if in_s is None else time.monotonic() + in_s
    move = a_move(stage, until=until)
    asyncio.run(move.run())
    if until is None:
        assert stage.heard_by == float("inf")
    else:
        assert move.predicted is not None
        assert stage.heard_by == until - move.predicted.seconds - ENDING_S
