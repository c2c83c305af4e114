# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the orchestrator that a migration is told to, and what it answers by default."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.criu_glue.survey.found import Survey
from liveshift.errors import Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.cost import prediction
from liveshift.runtime.messages import Message, Phase
from liveshift.runtime.migration.gpu_swap import GpuSwap
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.gpu_asked import GpuAsked
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.ownership import may_pass
from liveshift.runtime.model.steps import MigrationStep

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
PAIRS = [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")]
ANSWERS: dict[type[Message], Message | None] = {
    messages.Inspect: messages.Inspected(SURVEY, FACTS, 5),
    messages.Reserve: messages.Reserved([("CRIU", "4.2.1")], "tcp://10.88.0.12:7401"),
    messages.StartPrecopy: messages.Moved(10, [Phase("pre-copy", 0.0, 0.1, 10)]),
    messages.Freeze: FROZEN,
    messages.RestoreCapsule: messages.Moved(1000, [Phase("restore", 0.0, 0.3, 1000, True)]),
    messages.Resume: messages.Moved(0, [Phase("resume", 0.0, 0.01)]),
    messages.Settle: messages.Settled("ended"),
    messages.Progress: messages.Arrived(500, 0, False),
    messages.Forward: messages.Frozen(1000, []),
    messages.LookAtGpus: messages.SwapPlan("GPU 3", "GPU 5", PAIRS, [1001], 80, [("GPU", "H200")]),
    messages.SwapGpu: messages.Moved(0, [Phase("restore", 0.0, 0.3, 80, True)]),
    messages.SettleSwap: messages.SwapSettled("stays", "GPU 5 has no room"),
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
        self.limits: list[float] = []  # of the asks, in seconds
        self.fails: dict[str, list[Failure]] = {}
        self.steps: list[MigrationStep] = []
        self.told: list[str] = []
        self.heard_by = 0.0  # until when the move would wait for heartbeats
        self.gates: list[str] = []  # when they were closed and opened, by the count of ``said``
        self.grants = False
        self.releases = False
        self.spare = ""
        self.capsule: Capsule | None = None
        self.move: HostMigration | None = None

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

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        kind = type(message).__name__
        assert timeout > 0
        self.said.append(f"{kind} {host}")
        self.asks.append((host, message))
        self.limits.append(timeout)
        if kind == "RestoreCapsule" and self.grants:
            assert self.capsule is not None
            self.capsule.granted = True
        if f"{kind} {host}" == "Settle h1" and self.releases:
            assert self.move is not None
            self.move.released = True
        answer = ANSWERS[type(message)]
        if kind == "Settle" and self.capsule is not None and self.capsule.host == host:
            answer = RUNS
        answer = self._maybe_fail(kind, answer)
        return self._maybe_fail(f"{kind} {host}", answer)

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        assert may_pass(capsule.owner, still), f"{capsule.owner} may run it"
        self._maybe_fail("commit", None)
        capsule.host, capsule.epoch, capsule.granted = host, capsule.epoch + 1, False
        self.said.append(f"commit {host} {capsule.epoch}")

    def another_spare(self, migration: HostMigration) -> str:
        if not self.spare or self.spare in migration.tried:
            raise Refused("no spare can take it")
        return self.spare

    def predict(
        self,
        order: Order,
        inspected: messages.Inspected,
        reserved: messages.Reserved,
        within: float | None,
    ) -> messages.Prediction:
        return prediction.predict(prediction.Load.of(inspected, reserved.full_dump))

    def note(self, migration: Migration, text: str) -> None:
        self.told.append(text)

    async def until_heard(self, job: Job, by: float) -> None:
        self.heard_by = by
        self._maybe_fail("until_heard", None)

    async def quiesce(self, migration: Migration) -> str:
        self.gates.append(f"closed before {len(self.said)}")
        self._maybe_fail("quiesce", None)
        return "paused after collective 7 of gloo over ranks 0-1"

    async def reopen(self, migration: Migration) -> str:
        self.gates.append(f"open before {len(self.said)}")
        return "2 communicators rebuilt"

    async def publish(self, job: Job) -> None:
        self.said.append("publish " + " ".join(f"{h}:{e}" for h, e in job.book().where.values()))
        self._maybe_fail("publish", None)

    def record(self, migration: Migration) -> None:
        self.steps.append(migration.step)
        self._maybe_fail(f"record {migration.step.value}", None)

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.asks if isinstance(message, kind)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_seconds: float) -> None:
        return None

    monkeypatch.setattr(asyncio, "sleep", at_once)


def a_job(stage: Stage) -> Job:
    run = messages.RunJob("gpt", 2, ["torchrun", "train.py"], {}, "/", 0, [])
    capsules = {f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", 1) for i in range(2)}
    job = Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
    stage.capsule = capsules["gpt/1"]
    return job


def a_move(stage: Stage, **wishes: Any) -> HostMigration:
    job = a_job(stage)
    assert stage.capsule is not None
    order = Order(job, stage.capsule, "h2", "h1 is tainted", "root", **wishes)
    stage.move = HostMigration(stage, 7, order)
    return stage.move


def a_swap(stage: Stage, gpu: str = "5") -> GpuSwap:
    job = a_job(stage)
    assert stage.capsule is not None
    order = Order(job, stage.capsule, "h1", "ECC errors", "root", GpuAsked("h1", gpu, ""))
    return GpuSwap(stage, 7, order)


def play(stage: Stage) -> HostMigration:
    move = a_move(stage)
    _play(stage, move)
    return move


def play_swap(stage: Stage) -> GpuSwap:
    swap = a_swap(stage)
    _play(stage, swap)
    return swap


def _play(stage: Stage, move: Migration) -> None:
    asyncio.run(move.run())
    opened = [word for word in stage.gates if word.startswith("open")]
    assert len(opened) == len(stage.gates) - len(opened) <= 1, "the gates were left closed"


BEFORE = ["Inspect h1", "Reserve h2", "StartPrecopy h1", "Freeze h1"]
UP_TO_RESTORE = [*BEFORE, "commit h2 2", "publish h0:1 h2:2", "RestoreCapsule h2"]
HAPPY = [*UP_TO_RESTORE, "Resume h2", "Settle h1"]
UNDO = ["Settle h1", "Settle h2"]
AGAIN = ["commit h2 3", "publish h0:1 h2:3", "RestoreCapsule h2"]
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


SILENT = Unreachable("h1 fell silent")
WHOLE = messages.Arrived(1000, 1000, True)
NOT_DONE = StepFailed("restore", "CRIU could not")
