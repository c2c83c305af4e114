# SPDX-License-Identifier: Apache-2.0
"""A migration told step by step to a stand-in for the orchestrator that writes down every ask.

Each step is made to fail in turn and in several ways; what must hold is who may run the capsule
afterwards: before the commit its source, after it the destination, and never nobody in silence.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

from liveshift.criu_glue.network import Overlay
from liveshift.criu_glue.survey import Survey
from liveshift.errors import LiveshiftError, Refused, StepFailed, Unreachable
from liveshift.runtime import config, messages, migration
from liveshift.runtime.jobs import Capsule, Job
from liveshift.runtime.messages import Message, Phase
from liveshift.runtime.migration import Move
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
FROZEN = messages.Frozen(
    1000, {"image:pages-1.img": 1000}, {77: 20, 78: 21}, {}, [Phase("dump", 0.0, 0.4, 1000, True)]
)
ANSWERS: dict[type[Message], Message | None] = {
    messages.Inspect: messages.Inspected(SURVEY, FACTS, 5),
    messages.Reserve: messages.Reserved([("CRIU", "4.2.1")], "tcp://10.88.0.12:7401"),
    messages.Precopy: messages.Moved(10, [Phase("pre-copy", 0.0, 0.1, 10)]),
    messages.Freeze: FROZEN,
    messages.Restore: messages.Moved(1000, [Phase("restore", 0.0, 0.3, 1000, True)]),
    messages.Resume: messages.Moved(0, [Phase("resume", 0.0, 0.01)]),
    messages.Finish: None,
    messages.Thaw: None,
    messages.Discard: None,
}

Failure = Exception | Message | None


class Stage:
    """Stands in for the orchestrator: answers asks, and writes down everything in order."""

    cluster = CLUSTER

    def __init__(self) -> None:
        self.said: list[str] = []
        self.asks: list[tuple[str, Message]] = []
        self.fails: dict[str, list[Failure]] = {}
        self.steps: list[Step] = []

    def fail(self, what: str, *how: Failure) -> None:
        """The next calls of ``what`` (a message's name, commit, publish or record) go so."""
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
        return self._maybe_fail(kind, ANSWERS[type(message)])

    def commit(self, capsule: Capsule, host: str, epoch: int) -> None:
        self._maybe_fail("commit", None)
        self.said.append(f"commit {host} {epoch}")
        capsule.host, capsule.epoch = host, epoch

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


def play(stage: Stage) -> Move:
    run = messages.Run("gpt", 2, ["torchrun", "train.py"], {}, "/", 0, [])
    capsules = {f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", 1) for i in range(2)}
    job = Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
    capsule = capsules["gpt/1"]
    move = Move(stage, 7, job, capsule, "h2", "h1 is tainted", "root", stage.changed)
    asyncio.run(move.run())
    return move


BEFORE = ["Inspect h1", "Reserve h2", "Precopy h1", "Freeze h1"]
HAPPY = [*BEFORE, "commit h2 2", "publish h0:1 h2:2", "Restore h2", "Resume h2", "Finish h1"]
UNDO = ["Thaw h1", "Discard h2"]
RETURN = ["Discard h2", "commit h1 3", "publish h0:1 h1:3", "Thaw h1"]

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
    assert (restore.migration, restore.epoch, restore.frozen) == ("m7", 2, FROZEN)


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
    assert stage.said == [*BEFORE[: at + 1], *UNDO]
    assert move.step is Step.FAILED
    assert stage.steps[-2:] == [Step.ROLLING_BACK, Step.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    assert stage.sent(messages.Thaw)[0].epoch == 1
    row = move.row()
    assert row.error
    assert row.hint == ("try there" if isinstance(way, Refused) else None)
    if isinstance(way, LiveshiftError):
        assert row.error == str(way)
    if isinstance(way, ZeroDivisionError):
        assert "ZeroDivisionError: a slip" in row.error


@pytest.mark.parametrize(
    "way",
    [LiveshiftError("not owned under epoch 1 any more"), sqlite3.OperationalError("disk is full")],
    ids=named,
)
def test_a_commit_that_fails_is_no_commit(way: Exception) -> None:
    stage = Stage()
    stage.fail("commit", way)
    move = play(stage)
    assert stage.said == [*BEFORE, *UNDO]
    assert move.step is Step.FAILED
    assert str(way) in str(move.error)
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    assert move.row().frozen_s > 0


@pytest.mark.parametrize("what", ["Thaw", "Discard"])
@pytest.mark.parametrize("way", WAYS[:-1], ids=named)
def test_an_undo_that_fails_on_one_side_is_done_on_the_other(what: str, way: Failure) -> None:
    stage = Stage()
    stage.fail("Freeze", Refused("no"))
    stage.fail(what, way)
    move = play(stage)
    assert stage.said == [*BEFORE, *UNDO]
    assert move.step is Step.FAILED
    assert str(move.error) == "no"


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_restore_that_fails_passes_the_capsule_back(way: Failure) -> None:
    stage = Stage()
    stage.fail("Restore", way)
    move = play(stage)
    assert stage.said == [*HAPPY[:7], *RETURN]
    assert move.step is Step.FAILED
    assert stage.steps[-2:] == [Step.RETURNING, Step.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 3)
    assert stage.sent(messages.Thaw)[0].epoch == 3
    assert move.row().error


def test_a_publish_that_fails_passes_the_capsule_back() -> None:
    stage = Stage()
    stage.fail("publish", ZeroDivisionError("a slip"))
    move = play(stage)
    assert move.step is Step.FAILED
    assert stage.said[-4:] == RETURN


@pytest.mark.parametrize("what", ["commit", "Thaw"])
@pytest.mark.parametrize("way", [*WAYS[:-1], sqlite3.OperationalError("disk is full")], ids=named)
def test_it_is_lost_when_the_source_cannot_go_on_either(what: str, way: Exception) -> None:
    stage = Stage()
    stage.fail("Restore", Refused("no room here"))
    fine: list[Failure] = [None] if what == "commit" else []  # the first one goes well
    stage.fail(what, *fine, way)
    move = play(stage)
    assert move.step is Step.LOST
    assert "no room here; and back at h1: " in str(move.error)
    assert str(way) in str(move.error)


def test_a_destination_that_does_not_answer_the_discard_does_not_keep_the_capsule() -> None:
    stage = Stage()
    stage.fail("Restore", Unreachable("h2 did not answer"))
    stage.fail("Discard", Unreachable("h2 did not answer"))
    move = play(stage)
    assert stage.said[-4:] == RETURN
    assert move.step is Step.FAILED


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_that_nobody_saw_it_resume_changes_nothing(way: Failure) -> None:
    stage = Stage()
    stage.fail("Resume", way)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is Step.DONE


@pytest.mark.parametrize("way", WAYS[:-1], ids=named)
def test_a_source_that_does_not_finish_is_asked_again(way: Failure) -> None:
    stage = Stage()
    stage.fail("Finish", way, way)
    move = play(stage)
    assert stage.said == [*HAPPY, "Finish h1", "Finish h1"]
    assert move.step is Step.DONE
    stage = Stage()
    stage.fail("Finish", *[way] * 99)
    assert play(stage).step is Step.DONE


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
