# SPDX-License-Identifier: Apache-2.0
"""A migration from its commit on: it comes to run somewhere, unless its last copy has gone.

Also from where an orchestrator has left it that was killed meanwhile.
"""

from __future__ import annotations

import asyncio
import sqlite3

import msgspec
import pytest
from migration_stage import (
    AGAIN,
    BEFORE,
    HAPPY,
    HELD,
    NOT_DONE,
    NOTHING,
    RUNS,
    SILENT,
    UNDO,
    UP_TO_RESTORE,
    WAYS,
    WHOLE,
    Failure,
    Stage,
    a_move,
    named,
    no_waiting,
    play,
    returned,
)

from liveshift.errors import LiveshiftError, NotFound, SourceFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["no_waiting"]


@pytest.mark.parametrize("granted", [False, True])
def test_a_restore_that_fails_is_tried_again(granted: bool) -> None:
    stage = Stage()
    stage.grants = granted
    stage.fail("RestoreCapsule", NOT_DONE)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *AGAIN, *HAPPY[len(UP_TO_RESTORE) :]]
    assert move.step is MigrationStep.DONE
    assert move.row().error is None
    assert "tries the restore again on h2, because restore: CRIU could not" in stage.told


@pytest.mark.parametrize("granted", [False, True])
def test_a_restore_that_fails_twice_passes_the_capsule_back(granted: bool) -> None:
    stage = Stage()
    stage.grants = granted
    stage.fail("RestoreCapsule", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *AGAIN, "commit h2 4", *returned(5)]
    assert move.step is MigrationStep.FAILED
    assert stage.steps[-2:] == [MigrationStep.RETURNING, MigrationStep.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 5)
    assert move.row().error == str(NOT_DONE)


def test_the_error_of_a_migration_that_is_over_keeps_nothing_of_its_work_alive() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD, RUNS)
    error = play(stage).error
    assert error is not None
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


FORWARD = ["Reserve h3", "Forward h2", "commit h3 5", "publish h0:1 h3:5", "RestoreCapsule h3"]


def test_a_restore_that_fails_twice_is_done_on_another_spare() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("RestoreCapsule h2", NOT_DONE, NOT_DONE)
    move = play(stage)
    on = [*UP_TO_RESTORE, *AGAIN, "commit h2 4", *FORWARD]
    assert stage.said == [*on, "Resume h3", "Settle h1"]
    assert (move.capsule.host, move.capsule.epoch) == ("h3", 5)
    assert (move.step, move.row().destination) == (MigrationStep.DONE, "h3")
    (_, reserve), (forward,) = stage.sent(messages.Reserve), stage.sent(messages.Forward)
    assert (reserve.source, reserve.epoch) == ("h2", 5)
    assert (forward.destination, forward.endpoint) == ("h3", "tcp://10.88.0.12:7401")


def test_a_restore_that_fails_for_a_cause_in_the_capsule_is_not_tried_again_anywhere() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("RestoreCapsule", SourceFailed("restore", "it holds what CRIU cannot restore"))
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, "commit h2 3", *returned(4)]
    assert (move.step, move.capsule.host) == (MigrationStep.FAILED, "h1")
    assert isinstance(move.error, SourceFailed)


@pytest.mark.parametrize("what", ["Reserve h3", "Forward h2"])
@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_spare_that_cannot_take_it_over_leaves_it_to_the_source(what: str, way: Failure) -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("RestoreCapsule h2", NOT_DONE, NOT_DONE)
    stage.fail(what, way)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said[-4:] == returned(5)
    assert (move.step, move.capsule.host) == (MigrationStep.FAILED, "h1")


def test_when_that_spare_fails_too_the_source_gets_it_back() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("RestoreCapsule", *[NOT_DONE] * 4)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == [
        *(f"commit h2 {n}" for n in (2, 3, 4)),
        *(f"commit h3 {n}" for n in (5, 6, 7)),
        "commit h1 8",
    ]
    assert move.step is MigrationStep.FAILED


def test_a_destination_that_falls_silent_before_it_may_run_it_loses_it() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", Unreachable("h2 fell silent"))
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *returned(3)]
    assert move.step is MigrationStep.FAILED


def test_a_destination_where_it_may_run_is_waited_for() -> None:
    """However long it is silent: nobody else gets the capsule."""
    stage = Stage()
    stage.grants = True
    stage.fail("RestoreCapsule", *[Unreachable("h2 fell silent")] * 50)
    move = play(stage)
    assert stage.said.count("RestoreCapsule h2") == 51
    assert [word for word in stage.said if "commit" in word] == ["commit h2 2"]
    assert move.step is MigrationStep.DONE
    assert stage.told == ["waits for h2, where it may run"]


def test_a_destination_that_comes_back_without_what_it_ran_has_lost_it() -> None:
    stage = Stage()
    stage.grants = True
    stage.fail("RestoreCapsule", Unreachable("h2 fell silent"), NotFound("h2 has no image of it"))
    move = play(stage)
    assert move.step is MigrationStep.LOST
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 2)


def test_an_image_that_has_gone_before_it_ran_passes_the_capsule_back() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", NotFound("h2 has no image of it"))
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *returned(3)]
    assert move.step is MigrationStep.FAILED


@pytest.mark.parametrize("silent", [1, 20])
def test_while_the_source_is_away_the_destination_tries_on(silent: int) -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", *[NOT_DONE] * 2 * silent)
    stage.fail("Settle h1", *[Unreachable("h1 is away")] * silent)
    move = play(stage)
    assert {word.split()[1] for word in stage.said if "commit" in word} == {"h2"}
    assert stage.said.count("RestoreCapsule h2") == 2 * silent + 1
    assert move.step is MigrationStep.DONE


def test_the_last_image_is_not_given_up_for_a_source_that_lost_its_copy() -> None:
    """It promised to take it, and is switched off before it does: the destination gets it back."""
    stage = Stage()
    stage.fail("RestoreCapsule", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD, Unreachable("h1 is away"), NOTHING)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == [
        "commit h2 2",
        "commit h2 3",
        "commit h2 4",
        "commit h1 5",
        "commit h2 6",
    ]
    assert stage.sent(messages.RestoreCapsule)[-1].epoch == 6
    assert move.step is MigrationStep.DONE
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 6)


def test_an_image_that_was_used_up_and_a_source_that_lost_its_copy_make_it_lost() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", NOT_DONE, NotFound("its image on h2 was used up"))
    stage.fail("Settle h1", NOTHING)
    move = play(stage)
    assert stage.said.count("RestoreCapsule h2") == 2
    assert move.step is MigrationStep.LOST
    assert "its image on h2 was used up; and h1 has no copy either" in str(move.error)


def test_it_is_lost_when_no_side_has_it() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", NotFound("h2 has no image of it"))
    stage.fail("Settle h1", NOTHING)
    move = play(stage)
    assert move.step is MigrationStep.LOST
    assert "h2 has no image of it; and h1 has no copy either" in str(move.error)


def test_a_return_that_cannot_be_written_down_is_no_return() -> None:
    stage = Stage()
    stage.fail("RestoreCapsule", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD)
    stage.fail("commit", None, None, None, sqlite3.OperationalError("disk is full"))
    move = play(stage)
    assert move.step is MigrationStep.DONE
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 4)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_that_nobody_saw_it_resume_changes_nothing(way: Failure) -> None:
    stage = Stage()
    stage.fail("Resume", way)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE


@pytest.mark.parametrize("way", [w for w in WAYS if isinstance(w, LiveshiftError)], ids=named)
def test_a_source_that_does_not_finish_is_not_waited_for(way: Exception) -> None:
    stage = Stage()
    stage.fail("Settle", way)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE
    assert stage.told == [f"the frozen copy ends once h1 is back: {way}"]


# ---- after a restart of the orchestrator -------------------------------------------------------


def taken_up(
    stage: Stage, state: MigrationStep, host: str, epoch: int, granted: bool
) -> HostMigration:
    move = a_move(stage)
    capsule = move.capsule
    row = msgspec.structs.replace(move.row(), state=state.value)
    capsule.host, capsule.epoch, capsule.granted = host, epoch, granted
    again = HostMigration.from_row(stage, move.order, row)
    assert (again.name, again.source, again.destination) == ("m7", "h1", "h2")
    asyncio.run(again.recover())
    return again


@pytest.mark.parametrize(
    "state",
    [
        MigrationStep.PREPARING,
        MigrationStep.PRECOPYING,
        MigrationStep.QUIESCING,
        MigrationStep.FREEZING,
        MigrationStep.ROLLING_BACK,
    ],
)
def test_what_was_not_committed_is_rolled_back(state: MigrationStep) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h1", 1, True)
    assert [word for word in stage.said if word != "Progress h2"] == UNDO
    assert move.step is MigrationStep.FAILED
    assert "the orchestrator was restarted" in str(move.error)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("state", [MigrationStep.COMMITTED, MigrationStep.RESTORING])
def test_what_was_committed_goes_on(state: MigrationStep, granted: bool) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h2", 2, granted)
    assert stage.said == ["publish h0:1 h2:2", "RestoreCapsule h2", "Resume h2", "Settle h1"]
    assert move.step is MigrationStep.DONE


def test_what_was_passed_back_is_the_sources() -> None:
    stage = Stage()
    stage.fail("Settle h1", RUNS)
    move = taken_up(stage, MigrationStep.RETURNING, "h1", 3, False)
    assert stage.said == ["publish h0:1 h1:3", "Settle h1"]
    assert move.step is MigrationStep.FAILED


def test_what_was_about_to_be_passed_back_is() -> None:
    stage = Stage()
    stage.fail("Settle h1", HELD, RUNS)
    move = taken_up(stage, MigrationStep.RETURNING, "h2", 2, False)
    assert stage.said == returned(3)
    assert move.step is MigrationStep.FAILED


MAY_FREEZE = [MigrationStep.QUIESCING, MigrationStep.FREEZING]
"""The journal learns of a freeze some milliseconds after its source (SAVED_SOON)."""


@pytest.mark.parametrize("state", MAY_FREEZE)
def test_the_image_is_refused_before_a_source_that_may_freeze_is_asked(
    state: MigrationStep,
) -> None:
    """The source answers only after its freeze, which ends at once if its image is refused."""
    stage = Stage()
    taken_up(stage, state, "h1", 1, True)
    assert stage.said[:2] == ["Progress h2", "Settle h1"]
    assert [ask.close for ask in stage.sent(messages.Progress)][:1] == [True]


@pytest.mark.parametrize("state", MAY_FREEZE)
def test_what_was_complete_goes_on_after_a_restart(state: MigrationStep) -> None:
    stage = Stage()
    stage.fail("Progress", WHOLE)
    move = taken_up(stage, state, "h1", 1, True)
    assert stage.said == ["Progress h2", *HAPPY[len(BEFORE) :]]
    assert move.step is MigrationStep.DONE


def test_what_was_being_rolled_back_is_not_taken_from_a_source_that_may_run() -> None:
    stage = Stage()
    stage.fail("Progress", WHOLE, WHOLE)
    stage.fail("Settle h1", SILENT, RUNS)
    move = taken_up(stage, MigrationStep.ROLLING_BACK, "h1", 1, True)
    assert (move.step, move.capsule.host) == (MigrationStep.FAILED, "h1")


@pytest.mark.parametrize("state", [MigrationStep.RESUMING, MigrationStep.FINISHING])
def test_what_ran_is_finished(state: MigrationStep) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h2", 2, True)
    assert stage.said == ["Settle h1"]
    assert move.step is MigrationStep.DONE
