# SPDX-License-Identifier: Apache-2.0
"""A migration told step by step to a stand-in for the orchestrator that writes down every ask.

Each step is made to fail in turn and in several ways; what must hold is who may run the capsule
afterwards: before the commit its source, after it the destination, and never nobody in silence.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import msgspec
import pytest

from liveshift.criu_glue.network import Overlay
from liveshift.criu_glue.survey import Survey
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import config, messages, migration
from liveshift.runtime.jobs import Capsule, Job
from liveshift.runtime.messages import Message, Phase
from liveshift.runtime.migration import Move
from liveshift.runtime.ownership import may_pass
from liveshift.runtime.steps import ALLOWED, ENDS, Step

CLUSTER = config.parse(
    """
[cluster]
name = "story"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
[hosts.h1]
address = "10.88.0.11"
[hosts.h2]
address = "10.88.0.12"
"""
).cluster

SURVEY = Survey((1001, 1002), 300, 20, (), (), (), (), ())
FACTS = messages.HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1")
FROZEN = messages.Frozen(1000, [Phase("dump", 0.0, 0.4, 1000, True)])
ANSWERS: dict[type[Message], Message | None] = {
    messages.Inspect: messages.Inspected(SURVEY, FACTS, 5),
    messages.Reserve: messages.Reserved([("CRIU", "4.2.1")], "tcp://10.88.0.12:7401"),
    messages.Precopy: messages.Moved(10, [Phase("pre-copy", 0.0, 0.1, 10)]),
    messages.Freeze: FROZEN,
    messages.Restore: messages.Moved(1000, [Phase("restore", 0.0, 0.3, 1000, True)]),
    messages.Resume: messages.Moved(0, [Phase("resume", 0.0, 0.01)]),
    messages.Settle: messages.Settled("ended"),
    messages.Progress: messages.Arrived(500, 0, False),
    messages.Forward: messages.Frozen(1000, []),
}
HELD, RUNS, NOTHING = (messages.Settled(state) for state in ("held", "runs", "nothing"))

Failure = Exception | Message | None


class Stage:
    """Stands in for the orchestrator: answers asks, and writes down everything in order.

    As the real one would, it grants when a destination restores (``grants``) and the source when
    it settles what it owns.
    """

    cluster = CLUSTER

    def __init__(self) -> None:
        self.said: list[str] = []
        self.asks: list[tuple[str, Message]] = []
        self.fails: dict[str, list[Failure]] = {}
        self.steps: list[Step] = []
        self.told: list[str] = []
        self.grants = False
        self.releases = False
        self.spare = ""
        self.capsule: Capsule | None = None
        self.move: Move | None = None

    def fail(self, what: str, *how: Failure) -> None:
        """The next calls of ``what`` (a message's name, "name host", commit, publish or record)
        go so."""
        self.fails[what] = list(how)

    def _maybe_fail(self, what: str, answer: Message | None) -> Message | None:
        if self.fails.get(what):
            how = self.fails[what].pop(0)
            if isinstance(how, Exception):
                raise how
            return how
        return answer

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        kind = type(message).__name__
        assert timeout > 0
        self.said.append(f"{kind} {host}")
        self.asks.append((host, message))
        if kind == "Restore" and self.grants:
            assert self.capsule is not None
            self.capsule.granted = True
        if f"{kind} {host}" == "Settle h1" and self.releases:
            assert self.move is not None
            self.move.released = True
        answer = self._maybe_fail(kind, ANSWERS[type(message)])
        return self._maybe_fail(f"{kind} {host}", answer)

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        assert may_pass(capsule.owner, still), f"{capsule.owner} may run it"
        self._maybe_fail("commit", None)
        capsule.host, capsule.epoch, capsule.granted = host, capsule.epoch + 1, False
        self.said.append(f"commit {host} {capsule.epoch}")

    def another_spare(self, move: Move) -> str:
        if not self.spare or self.spare in move.tried:
            raise Refused("no spare can take it")
        return self.spare

    def tell(self, move: Move, text: str) -> None:
        self.told.append(text)

    async def publish(self, job: Job) -> None:
        self.said.append("publish " + " ".join(f"{h}:{e}" for h, e in job.book().where.values()))
        self._maybe_fail("publish", None)

    def changed(self, move: Move) -> None:
        self.steps.append(move.step)
        self._maybe_fail(f"record {move.step.value}", None)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.asks if isinstance(message, kind)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_seconds: float) -> None:
        return None

    monkeypatch.setattr(migration.asyncio, "sleep", at_once)


def a_move(stage: Stage) -> Move:
    run = messages.Run("gpt", 2, ["torchrun", "train.py"], {}, "/", 0, [])
    capsules = {f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", 1) for i in range(2)}
    job = Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
    stage.capsule = capsules["gpt/1"]
    stage.move = Move(stage, 7, job, stage.capsule, "h2", "h1 is tainted", "root", stage.changed)
    return stage.move


def play(stage: Stage) -> Move:
    move = a_move(stage)
    asyncio.run(move.run())
    return move


BEFORE = ["Inspect h1", "Reserve h2", "Precopy h1", "Freeze h1"]
UP_TO_RESTORE = [*BEFORE, "commit h2 2", "publish h0:1 h2:2", "Restore h2"]
HAPPY = [*UP_TO_RESTORE, "Resume h2", "Settle h1"]
UNDO = ["Settle h1", "Settle h2"]
AGAIN = ["commit h2 3", "publish h0:1 h2:3", "Restore h2"]
RETURN = ["Settle h1", "commit h1 {0}", "publish h0:1 h1:{0}", "Settle h1"]


def returned(epoch: int) -> list[str]:
    """How the source gets it back under an epoch."""
    return [word.format(epoch) for word in RETURN]


WAYS: list[Failure] = [
    Refused("not here", hint="try there"),
    Unreachable("h1 did not answer"),
    StepFailed("dump", "CRIU could not"),
    ZeroDivisionError("a slip"),
    None,
]
"""How an ask may go wrong; the last: an answer that is none."""


def named(way: Failure) -> str:
    return type(way).__name__


def test_the_order_of_things() -> None:
    stage = Stage()
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is Step.DONE
    assert move.error is None
    assert stage.steps == [
        Step.PRECOPYING, Step.FREEZING, Step.COMMITTED, Step.RESTORING, Step.RESUMING,
        Step.FINISHING, Step.DONE,
    ]  # fmt: skip
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 2)


def test_what_each_side_is_told() -> None:
    stage = Stage()
    play(stage)
    (reserve,) = stage.sent(messages.Reserve)
    assert (reserve.migration, reserve.source, reserve.epoch, reserve.dry_run) == (
        "m7", "h1", 2, False,
    )  # fmt: skip
    assert reserve.survey == SURVEY
    assert reserve.spec.name == "gpt/1"
    (precopy,) = stage.sent(messages.Precopy)
    assert (precopy.destination, precopy.endpoint) == ("h2", "tcp://10.88.0.12:7401")
    (restore,) = stage.sent(messages.Restore)
    assert (restore.migration, restore.capsule, restore.epoch) == ("m7", "gpt/1", 2)
    assert reserve.limit_bytes > 2 * (300 + 20)


def test_the_record() -> None:
    row = play(Stage()).row()
    assert (row.name, row.capsule, row.source, row.destination) == ("m7", "gpt/1", "h1", "h2")
    assert (row.state, row.epoch, row.reason, row.by) == ("done", 2, "h1 is tainted", "root")
    assert (row.image_bytes, row.expected_bytes) == (1000, 320)
    assert [phase.name for phase in row.phases] == [
        "prepare", "pre-copy", "dump", "commit", "restore", "resume", "finish",
    ]  # fmt: skip
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
    assert move.step is Step.FAILED
    assert stage.steps[-2:] == [Step.ROLLING_BACK, Step.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    row = move.row()
    assert row.error
    assert row.hint == ("try there" if isinstance(way, Refused) else None)
    if isinstance(way, LiveshiftError):
        assert row.error == str(way)
    if isinstance(way, ZeroDivisionError):
        assert "ZeroDivisionError: a slip" in row.error


SILENT = Unreachable("h1 fell silent")
WHOLE = messages.Arrived(1000, 1000, True)


def test_a_source_that_falls_silent_does_not_hold_up_a_complete_image() -> None:
    """It has promised to wait before the image was complete, so the capsule may go on."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", messages.Arrived(900, 0, False), WHOLE, WHOLE)
    move = play(stage)
    looks = ["Progress h2", "Progress h2"]
    assert stage.said == [*BEFORE, *looks, "Progress h2", *HAPPY[len(BEFORE) :]]
    assert move.step is Step.DONE
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
    assert move.step is Step.FAILED
    assert str(way) in str(move.error)
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    assert move.row().frozen_s > 0


@pytest.mark.parametrize("host", ["h1", "h2"])
@pytest.mark.parametrize("way", WAYS, ids=named)
def test_an_undo_that_fails_on_one_side_is_done_on_the_other(host: str, way: Failure) -> None:
    """Who was not told asks by itself."""
    stage = Stage()
    stage.fail("Precopy", Refused("no"))
    stage.fail(f"Settle {host}", way)
    move = play(stage)
    assert stage.said == [*BEFORE[:3], *UNDO]
    assert move.step is Step.FAILED
    assert str(move.error) == "no"
    assert stage.told == (["h1 goes on once it is back"] if host == "h1" else [])


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_complete_image_moves_on_whatever_was_said_of_the_freeze(way: Failure) -> None:
    stage = Stage()
    stage.fail("Freeze", way)
    stage.fail("Progress", *[WHOLE] * 3)
    move = play(stage)
    assert [word for word in stage.said if word != "Progress h2"] == HAPPY
    assert (move.step, move.row().error) == (Step.DONE, None)
    assert move.row().image_bytes == 1000


def test_with_both_sides_silent_nothing_is_decided() -> None:
    """Until one of them speaks: here the destination, which has the whole image."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", *[Unreachable("h2 fell silent")] * 20, WHOLE)
    stage.fail("Settle h1", *[SILENT] * 19)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == ["commit h2 2"]
    assert move.step is Step.DONE


def test_a_source_that_was_told_to_run_keeps_it() -> None:
    """Its answer was lost: the complete image is of the past now."""
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Progress", *[Unreachable("h2 fell silent")] * 3, WHOLE)
    stage.fail("Settle h1", SILENT, SILENT, RUNS)
    stage.releases = True
    move = play(stage)
    assert not [word for word in stage.said if "commit" in word]
    assert (move.step, move.capsule.host) == (Step.FAILED, "h1")


def test_a_source_that_went_down_before_its_image_was_complete_has_lost_it() -> None:
    stage = Stage()
    stage.fail("Freeze", SILENT)
    stage.fail("Settle h1", NOTHING)
    assert play(stage).step is Step.LOST


NOT_DONE = StepFailed("restore", "CRIU could not")


@pytest.mark.parametrize("granted", [False, True])
def test_a_restore_that_fails_is_tried_again(granted: bool) -> None:
    stage = Stage()
    stage.grants = granted
    stage.fail("Restore", NOT_DONE)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *AGAIN, *HAPPY[len(UP_TO_RESTORE) :]]
    assert move.step is Step.DONE
    assert move.row().error is None
    assert "tried again at h2: restore: CRIU could not" in stage.told


@pytest.mark.parametrize("granted", [False, True])
def test_a_restore_that_fails_twice_passes_the_capsule_back(granted: bool) -> None:
    stage = Stage()
    stage.grants = granted
    stage.fail("Restore", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *AGAIN, "commit h2 4", *returned(5)]
    assert move.step is Step.FAILED
    assert stage.steps[-2:] == [Step.RETURNING, Step.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 5)
    assert move.row().error == str(NOT_DONE)


FORWARD = ["Reserve h3", "Forward h2", "commit h3 5", "publish h0:1 h3:5", "Restore h3"]


def test_a_restore_that_fails_twice_is_done_on_another_spare() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("Restore h2", NOT_DONE, NOT_DONE)
    move = play(stage)
    on = [*UP_TO_RESTORE, *AGAIN, "commit h2 4", *FORWARD]
    assert stage.said == [*on, "Resume h3", "Settle h1"]
    assert (move.capsule.host, move.capsule.epoch) == ("h3", 5)
    assert (move.step, move.row().destination) == (Step.DONE, "h3")
    (_, reserve), (forward,) = stage.sent(messages.Reserve), stage.sent(messages.Forward)
    assert (reserve.source, reserve.epoch) == ("h2", 5)
    assert (forward.destination, forward.endpoint) == ("h3", "tcp://10.88.0.12:7401")


@pytest.mark.parametrize("what", ["Reserve h3", "Forward h2"])
@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_spare_that_cannot_take_it_over_leaves_it_to_the_source(what: str, way: Failure) -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("Restore h2", NOT_DONE, NOT_DONE)
    stage.fail(what, way)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said[-4:] == returned(5)
    assert (move.step, move.capsule.host) == (Step.FAILED, "h1")


def test_when_that_spare_fails_too_the_source_gets_it_back() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("Restore", *[NOT_DONE] * 4)
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == [
        *(f"commit h2 {n}" for n in (2, 3, 4)), *(f"commit h3 {n}" for n in (5, 6, 7)),
        "commit h1 8",
    ]  # fmt: skip
    assert move.step is Step.FAILED


def test_a_destination_that_falls_silent_before_it_may_run_it_loses_it() -> None:
    stage = Stage()
    stage.fail("Restore", Unreachable("h2 fell silent"))
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *returned(3)]
    assert move.step is Step.FAILED


def test_a_destination_where_it_may_run_is_waited_for() -> None:
    """However long it is silent: nobody else gets the capsule."""
    stage = Stage()
    stage.grants = True
    stage.fail("Restore", *[Unreachable("h2 fell silent")] * 50)
    move = play(stage)
    assert stage.said.count("Restore h2") == 51
    assert [word for word in stage.said if "commit" in word] == ["commit h2 2"]
    assert move.step is Step.DONE
    assert stage.told == ["waiting for h2, where it may run"]


def test_a_destination_that_comes_back_without_what_it_ran_has_lost_it() -> None:
    stage = Stage()
    stage.grants = True
    stage.fail("Restore", Unreachable("h2 fell silent"), NotFound("h2 has no image of it"))
    move = play(stage)
    assert move.step is Step.LOST
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 2)


def test_an_image_that_has_gone_before_it_ran_passes_the_capsule_back() -> None:
    stage = Stage()
    stage.fail("Restore", NotFound("h2 has no image of it"))
    stage.fail("Settle h1", HELD, RUNS)
    move = play(stage)
    assert stage.said == [*UP_TO_RESTORE, *returned(3)]
    assert move.step is Step.FAILED


@pytest.mark.parametrize("silent", [1, 20])
def test_while_the_source_is_away_the_destination_tries_on(silent: int) -> None:
    stage = Stage()
    stage.fail("Restore", *[NOT_DONE] * 2 * silent)
    stage.fail("Settle h1", *[Unreachable("h1 is away")] * silent)
    move = play(stage)
    assert {word.split()[1] for word in stage.said if "commit" in word} == {"h2"}
    assert stage.said.count("Restore h2") == 2 * silent + 1
    assert move.step is Step.DONE


def test_the_last_image_is_not_given_up_for_a_source_that_lost_its_copy() -> None:
    """It promised to take it, and is switched off before it does: the destination gets it back."""
    stage = Stage()
    stage.fail("Restore", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD, Unreachable("h1 is away"), NOTHING)
    move = play(stage)
    assert [word for word in stage.said if "commit" in word] == [
        "commit h2 2", "commit h2 3", "commit h2 4", "commit h1 5", "commit h2 6",
    ]  # fmt: skip
    assert stage.sent(messages.Restore)[-1].epoch == 6
    assert move.step is Step.DONE
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 6)


def test_it_is_lost_when_no_side_has_it() -> None:
    stage = Stage()
    stage.fail("Restore", NotFound("h2 has no image of it"))
    stage.fail("Settle h1", NOTHING)
    move = play(stage)
    assert move.step is Step.LOST
    assert "h2 has no image of it; and h1 has no copy either" in str(move.error)


def test_a_return_that_cannot_be_written_down_is_no_return() -> None:
    stage = Stage()
    stage.fail("Restore", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD)
    stage.fail("commit", None, None, None, sqlite3.OperationalError("disk is full"))
    move = play(stage)
    assert move.step is Step.DONE
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 4)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_that_nobody_saw_it_resume_changes_nothing(way: Failure) -> None:
    stage = Stage()
    stage.fail("Resume", way)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is Step.DONE


@pytest.mark.parametrize("way", [w for w in WAYS if isinstance(w, LiveshiftError)], ids=named)
def test_a_source_that_does_not_finish_is_not_waited_for(way: Exception) -> None:
    stage = Stage()
    stage.fail("Settle", way)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is Step.DONE
    assert stage.told == [f"the frozen copy ends once h1 is back: {way}"]


# ---- after a restart of the orchestrator -------------------------------------------------------


def taken_up(stage: Stage, state: Step, host: str, epoch: int, granted: bool) -> Move:
    move = a_move(stage)
    capsule = move.capsule
    row = msgspec.structs.replace(move.row(), state=state.value)
    capsule.host, capsule.epoch, capsule.granted = host, epoch, granted
    again = Move.left_behind(stage, move.job, capsule, row, stage.changed)
    assert (again.name, again.source, again.destination) == ("m7", "h1", "h2")
    asyncio.run(again.take_up())
    return again


@pytest.mark.parametrize(
    "state", [Step.PREPARING, Step.PRECOPYING, Step.FREEZING, Step.ROLLING_BACK]
)
def test_what_was_not_committed_is_rolled_back(state: Step) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h1", 1, True)
    assert [word for word in stage.said if word != "Progress h2"] == UNDO
    assert move.step is Step.FAILED
    assert "the orchestrator was restarted" in str(move.error)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("state", [Step.COMMITTED, Step.RESTORING])
def test_what_was_committed_goes_on(state: Step, granted: bool) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h2", 2, granted)
    assert stage.said == ["publish h0:1 h2:2", "Restore h2", "Resume h2", "Settle h1"]
    assert move.step is Step.DONE


def test_what_was_passed_back_is_the_sources() -> None:
    stage = Stage()
    stage.fail("Settle h1", RUNS)
    move = taken_up(stage, Step.RETURNING, "h1", 3, False)
    assert stage.said == ["publish h0:1 h1:3", "Settle h1"]
    assert move.step is Step.FAILED


def test_what_was_about_to_be_passed_back_is() -> None:
    stage = Stage()
    stage.fail("Settle h1", HELD, RUNS)
    move = taken_up(stage, Step.RETURNING, "h2", 2, False)
    assert stage.said == returned(3)
    assert move.step is Step.FAILED


def test_what_was_complete_goes_on_after_a_restart() -> None:
    stage = Stage()
    stage.fail("Progress", WHOLE)
    move = taken_up(stage, Step.FREEZING, "h1", 1, True)
    assert stage.said == ["Progress h2", *HAPPY[len(BEFORE) :]]
    assert move.step is Step.DONE


def test_what_was_being_rolled_back_is_not_taken_from_a_source_that_may_run() -> None:
    stage = Stage()
    stage.fail("Progress", WHOLE, WHOLE)
    stage.fail("Settle h1", SILENT, RUNS)
    move = taken_up(stage, Step.ROLLING_BACK, "h1", 1, True)
    assert (move.step, move.capsule.host) == (Step.FAILED, "h1")


@pytest.mark.parametrize("state", [Step.RESUMING, Step.FINISHING])
def test_what_ran_is_finished(state: Step) -> None:
    stage = Stage()
    move = taken_up(stage, state, "h2", 2, True)
    assert stage.said == ["Settle h1"]
    assert move.step is Step.DONE


# ---- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Step.COMMITTED, Step.RESTORING, Step.FINISHING, Step.DONE])
def test_a_record_that_cannot_be_written_does_not_change_who_runs_it(step: Step) -> None:
    """The commit is the one write that counts; the rest is for people."""
    stage = Stage()
    stage.fail(f"record {step.value}", sqlite3.OperationalError("disk is full"))
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is Step.DONE


def test_steps_lead_somewhere_and_end() -> None:
    assert set(ALLOWED) == set(Step)
    assert {Step.DONE, Step.FAILED, Step.LOST} == ENDS
    for start in Step:
        reached, edge = {start}, {start}
        while edge:
            edge = {after for step in edge for after in ALLOWED[step]} - reached
            reached |= edge
        assert reached & ENDS
    committed = {Step.COMMITTED, Step.RESTORING, Step.RESUMING, Step.FINISHING, Step.RETURNING}
    for step in committed:
        assert Step.ROLLING_BACK not in ALLOWED[step]


def test_a_step_out_of_order_is_a_mistake_in_the_program() -> None:
    move = play(Stage())
    with pytest.raises(AssertionError, match="may not become"):
        move._advance(Step.PREPARING)
