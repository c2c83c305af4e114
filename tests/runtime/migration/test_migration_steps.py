# SPDX-License-Identifier: Apache-2.0
"""A migration told step by step to a stand-in for the orchestrator that writes down every ask.

Each step is made to fail in turn and in several ways; what must hold is who may run the capsule
afterwards: before the commit its source, after it the destination, and never nobody in silence.
"""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace

import pytest
from migration_stage import (
    BEFORE,
    FACTS,
    HAPPY,
    NOTHING,
    RUNS,
    SILENT,
    SURVEY,
    UNDO,
    WAYS,
    WHOLE,
    Failure,
    Stage,
    a_move,
    named,
    no_waiting,
    play,
)

from liveshift.errors import LiveshiftError, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.migration.context import MOST_NAMED, NoBoundary, limit_bytes
from liveshift.runtime.model.steps import ALLOWED, ENDS, MigrationStep

__all__ = ["no_waiting"]


def test_the_order_of_things() -> None:
    stage = Stage()
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE
    assert move.error is None
    assert stage.steps == [
        MigrationStep.PRECOPYING,
        MigrationStep.QUIESCING,
        MigrationStep.FREEZING,
        MigrationStep.COMMITTED,
        MigrationStep.RESTORING,
        MigrationStep.RESUMING,
        MigrationStep.FINISHING,
        MigrationStep.DONE,
    ]
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 2)


def test_connections_that_will_break_are_told_before_anything_is_done() -> None:
    look = messages.Inspected(SURVEY, FACTS, 5, outside=["203.0.113.5:443 (https)"] * 65)
    stage = Stage()
    stage.fail("Inspect", look)
    play(stage)
    (said,) = [line for line in stage.told if line.startswith("breaks ")]
    assert said.startswith(
        "breaks 65 connections to outside the cluster: 203.0.113.5:443 (https); "
    )
    assert said.endswith("; and 1 more")
    assert said.count("203.0.113.5") == MOST_NAMED == 64


def test_versions_that_may_make_the_restore_fail_are_noted() -> None:
    stage = Stage()
    warnings = ["the image is of a host with Linux 6.12, and h2 has 6.1: the restore may fail"]
    stage.fail("Reserve", messages.Reserved([], "tcp://10.88.0.12:7401", warnings=warnings))
    play(stage)
    assert [line for line in stage.told if "may fail" in line] == warnings


def test_connections_that_were_opened_during_the_pre_copy_are_told_before_the_freeze() -> None:
    stage = Stage()
    stage.fail("Inspect", messages.Inspected(SURVEY, FACTS, 5, outside=["203.0.113.5:443"]))
    now = ["203.0.113.5:443", "203.0.113.6:80 (http)"]
    stage.fail("StartPrecopy", messages.Moved(10, [], outside=now))
    play(stage)
    assert [line for line in stage.told if line.startswith("breaks ")] == [
        "breaks a connection to outside the cluster: 203.0.113.5:443",
        "breaks a new connection to outside the cluster: 203.0.113.6:80 (http)",
    ]


def test_the_gates_are_closed_before_the_freeze_and_opened_when_it_runs() -> None:
    stage = Stage()
    move = play(stage)
    at = {name: stage.said.index(name) for name in ("Freeze h1", "Resume h2")}
    assert stage.gates == [
        f"closed before {at['Freeze h1']}",
        f"open before {at['Resume h2']}",
    ]
    (quiesce,) = [phase for phase in move.row().phases if phase.name == "quiesce"]
    assert quiesce.detail == "paused after collective 7 of gloo over ranks 0-1"


def test_a_job_that_talks_over_tcp_is_frozen_in_place_without_a_boundary() -> None:
    stage = Stage()
    stage.fail("quiesce", NoBoundary("rank 1 owes an all-reduce", only_tcp=True))
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE
    assert any("frozen in place" in text and "rank 1 owes" in text for text in stage.told)


@pytest.mark.parametrize(
    "way",
    [
        NoBoundary("rank 1 owes an all-reduce", only_tcp=False),
        Unreachable("h0 did not answer"),
        ZeroDivisionError("a slip"),
    ],
    ids=lambda way: type(way).__name__,
)
def test_without_a_boundary_nothing_is_frozen(way: Exception) -> None:
    stage = Stage()
    stage.fail("quiesce", way)
    move = play(stage)
    assert move.step is MigrationStep.FAILED
    assert stage.said == [*BEFORE[:-1], *UNDO]
    assert stage.gates[1:] == [f"open before {len(BEFORE)}"]
    assert str(way) in str(move.error)


def test_what_each_side_is_told() -> None:
    stage = Stage()
    play(stage)
    (reserve,) = stage.sent(messages.Reserve)
    assert (reserve.migration, reserve.source, reserve.epoch, reserve.dry_run) == (
        "m7",
        "h1",
        2,
        False,
    )
    assert reserve.survey == SURVEY
    assert reserve.spec.name == "gpt/1"
    (precopy,) = stage.sent(messages.StartPrecopy)
    assert (precopy.destination, precopy.endpoint) == ("h2", "tcp://10.88.0.12:7401")
    (restore,) = stage.sent(messages.RestoreCapsule)
    assert (restore.migration, restore.capsule, restore.epoch) == ("m7", "gpt/1", 2)
    assert reserve.limit_bytes > 2 * (300 + 20)
    look = messages.Inspected(replace(SURVEY, nameless=10**10), FACTS, 5)
    assert limit_bytes(look) == reserve.limit_bytes + 2 * 10**10


def test_the_record() -> None:
    row = play(Stage()).row()
    assert (row.name, row.capsule, row.source, row.destination) == ("m7", "gpt/1", "h1", "h2")
    assert (row.state, row.epoch, row.reason, row.by) == ("done", 2, "h1 is tainted", "root")
    assert (row.image_bytes, row.expected_bytes) == (1000, 320)
    assert [phase.name for phase in row.phases] == [
        "prepare",
        "pre-copy",
        "quiesce",
        "dump",
        "messages",
        "commit",
        "restore",
        "messages",
        "address book",
        "reopen",
        "resume",
        "finish",
    ]
    assert 0 < row.frozen_s <= row.seconds
    assert row.error is None


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("at", range(len(BEFORE)), ids=lambda at: BEFORE[at].split()[0])
def test_before_the_commit_any_failure_leaves_the_capsule_at_its_source(
    at: int, way: Failure
) -> None:
    stage = Stage()
    stage.fail(BEFORE[at].split()[0], way)
    move = play(stage)
    assert [word for word in stage.said if word != "Progress h2"] == [*BEFORE[: at + 1], *UNDO]
    assert ("Progress h2" in stage.said) == (at == 3), "perhaps its image is complete"
    assert move.step is MigrationStep.FAILED
    assert stage.steps[-2:] == [MigrationStep.ROLLING_BACK, MigrationStep.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    row = move.row()
    assert row.error
    assert row.hint == ("try there" if isinstance(way, Refused) else None)
    if isinstance(way, LiveshiftError):
        assert row.error == str(way)
    if isinstance(way, ZeroDivisionError):
        assert "ZeroDivisionError: a slip" in row.error


def test_a_source_that_falls_silent_does_not_hold_up_a_complete_image() -> None:
    """It has promised to wait before the image was complete, so the capsule may go on."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", messages.Arrived(900, 0, False), WHOLE, WHOLE)
    move = play(stage)
    looks = ["Progress h2", "Progress h2"]
    assert stage.said == [*BEFORE, *looks, "Progress h2", *HAPPY[len(BEFORE) :]]
    assert move.step is MigrationStep.DONE
    assert move.row().image_bytes == 1000
    assert any("h1 fell silent" in told for told in stage.told)


def test_an_image_that_comes_no_further_is_given_up_with_its_source() -> None:
    stage = Stage()
    stage.fail("Freeze", SILENT)
    move = play(stage)
    assert stage.said == [*BEFORE, *["Progress h2"] * 3, *UNDO]
    assert [ask.close for ask in stage.sent(messages.Progress)] == [False, False, True]
    assert str(move.error) == "h1 fell silent"


@pytest.mark.parametrize(
    "way",
    [LiveshiftError("not owned under epoch 1 any more"), sqlite3.OperationalError("disk is full")],
    ids=named,
)
def test_a_commit_that_fails_is_no_commit(way: Exception) -> None:
    stage = Stage()
    stage.fail("commit", way, way)
    stage.fail("Progress", WHOLE)
    move = play(stage)
    assert stage.said == [*BEFORE, "Progress h2", *UNDO]
    assert move.step is MigrationStep.FAILED
    assert str(way) in str(move.error)
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    assert move.row().frozen_s > 0


@pytest.mark.parametrize("known", [True, False], ids=["known", "heard at the source"])
@pytest.mark.parametrize("at", range(len(BEFORE)), ids=lambda at: BEFORE[at].split()[0])
def test_a_move_that_the_end_of_its_job_overtakes(at: int, known: bool) -> None:
    """That is neither a failure of the move nor a move that went on without an error."""
    stage = Stage()
    stage.fail(BEFORE[at].split()[0], StepFailed("freeze", "no such process"))
    stage.fail("Settle h1", messages.Settled("ended"))
    move = a_move(stage)
    move.capsule.code = 3 if known else None
    asyncio.run(move.run())
    assert stage.steps[-2:] == [MigrationStep.ROLLING_BACK, MigrationStep.JOB_ENDED]
    row, how = move.row(), "ended with code 3" if known else "ended"
    # What the source says of it at the freeze is kept: the move itself may have ended it.
    why = ": freeze: no such process" if BEFORE[at].startswith("Freeze") else ""
    assert (row.state, row.error) == (
        "job ended",
        f"gpt/1 {how} before it could move h1 → h2{why}",
    )
    assert row.hint is None


@pytest.mark.parametrize("host", ["h1", "h2"])
@pytest.mark.parametrize("way", WAYS, ids=named)
def test_an_undo_that_fails_on_one_side_is_done_on_the_other(host: str, way: Failure) -> None:
    """Who was not told asks by itself."""
    stage = Stage()
    stage.fail("StartPrecopy", Refused("no"))
    stage.fail(f"Settle {host}", way)
    move = play(stage)
    assert stage.said == [*BEFORE[:3], *UNDO]
    assert move.step is MigrationStep.FAILED
    assert str(move.error) == "no"
    assert stage.told == (["h1 goes on once it is back"] if host == "h1" else [])


def test_a_busy_destination_has_time_to_say_how_much_it_has_placed() -> None:
    """The job trains on meanwhile."""
    stage = Stage()
    move = a_move(stage)
    move._limits = replace(move._limits, suspicion=1.0)
    move.precopy = messages.Rounds(1, 1000, 0, 0, 1e9)
    stage.fail("Progress", *[messages.Arrived(900, 0, False, placing=True)] * 2)
    asyncio.run(move._place_ahead())
    assert stage.said == ["Progress h2"] * 3
    assert all(2.0 < limit <= move._limits.prepare for limit in stage.limits)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_complete_image_moves_on_whatever_was_said_of_the_freeze(way: Failure) -> None:
    stage = Stage()
    stage.fail("Freeze", way)
    stage.fail("Progress", *[WHOLE] * 3)
    move = play(stage)
    assert [word for word in stage.said if word != "Progress h2"] == HAPPY
    assert (move.step, move.row().error) == (MigrationStep.DONE, None)
    assert move.row().image_bytes == 1000


def test_with_both_sides_silent_nothing_is_decided() -> None:
    """Until one of them speaks: here the destination, which has the whole image."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", *[Unreachable("h2 fell silent")] * 20, WHOLE)
    stage.fail("Settle h1", *[SILENT] * 19)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == ["commit h2 2"]
    assert move.step is MigrationStep.DONE


def test_a_source_that_was_told_to_run_keeps_it() -> None:
    """Its answer was lost: the complete image is of the past now."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", *[Unreachable("h2 fell silent")] * 3, WHOLE)
    stage.fail("Settle h1", SILENT, SILENT, RUNS)
    stage.releases = True
    move = play(stage)
    assert not [word for word in stage.said if "commit" in word]
    assert (move.step, move.capsule.host) == (MigrationStep.FAILED, "h1")


def test_a_source_that_went_down_before_its_image_was_complete_has_lost_it() -> None:
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Settle h1", NOTHING)
    assert play(stage).step is MigrationStep.LOST


# ---- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [MigrationStep.COMMITTED, MigrationStep.RESTORING, MigrationStep.FINISHING, MigrationStep.DONE],
)
def test_a_record_that_cannot_be_written_does_not_change_who_runs_it(step: MigrationStep) -> None:
    """The commit is the one write that counts; the rest is for people."""
    stage = Stage()
    stage.fail(f"record {step.value}", sqlite3.OperationalError("disk is full"))
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE


def test_steps_lead_somewhere_and_end() -> None:
    assert set(ALLOWED) == set(MigrationStep)
    assert {
        MigrationStep.DONE,
        MigrationStep.FAILED,
        MigrationStep.JOB_ENDED,
        MigrationStep.LOST,
        MigrationStep.REWOUND,
    } == ENDS
    for start in MigrationStep:
        reached, edge = {start}, {start}
        while edge:
            edge = {after for step in edge for after in ALLOWED[step]} - reached
            reached |= edge
        assert reached & ENDS
    committed = {
        MigrationStep.COMMITTED,
        MigrationStep.RESTORING,
        MigrationStep.RESUMING,
        MigrationStep.FINISHING,
        MigrationStep.RETURNING,
    }
    for step in committed:
        assert MigrationStep.ROLLING_BACK not in ALLOWED[step]


def test_a_step_out_of_order_is_a_mistake_in_the_program() -> None:
    move = play(Stage())
    with pytest.raises(AssertionError, match="may not become"):
        move._advance(MigrationStep.PREPARING)
