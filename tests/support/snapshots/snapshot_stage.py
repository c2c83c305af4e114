# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the orchestrator and its agents, to which a snapshot is told step by step.

It keeps of each source what decides about the cut: whether its session is over, and whether its
network is locked. A source answers as a real one does: once it has thawed, it refuses to lock and
to dump.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.criu_glue.survey.found import Survey
from liveshift.errors import LiveshiftError, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Message
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.snapshot import Snapshot

CLUSTER = config.parse(
    """
[cluster]
name = "stage"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
[hosts.h1]
address = "10.88.0.11"
[hosts.h2]
address = "10.88.0.12"
[hosts.h3]
address = "10.88.0.13"
[files]
carried = ["/scratch"]
[timeouts]
suspicion = 0.3
heartbeat = 0.01
"""
).cluster

SURVEY = Survey((1001, 1002), 300, 20, (), (), (), (), ())
FACTS = messages.HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1")
BOUNDARY = "paused after collective 7 of gloo over ranks 0-2"
CAPSULES = {f"gpt/{i}" for i in range(3)}
HOLDER = "h3"
TURNS = 5

ANSWERS: dict[type[Message], Message | None] = {
    messages.Inspect: messages.Inspected(SURVEY, FACTS, 5),
    messages.Hold: messages.Holding("tcp://10.88.0.13:7401", base=4, least=6),
    messages.StartSnapshot: messages.Moved(10, []),
    messages.LockCapsule: None,
    messages.DumpCapsule: messages.Frozen(1000, []),
    messages.ThawCapsule: None,
    messages.SealSnapshot: messages.SnapshotClosed(b"digest"),
    messages.CloseSnapshot: messages.SnapshotClosed(b"digest"),
    messages.CheckHeld: messages.Held(100),
    messages.StartMeasure: None,
    messages.EndMeasure: messages.Worked("collectives", 100.0, 110.0, 100.0, 10.0, 3.0, 0.1),
}

Failure = Exception | Message | None


WAYS: list[Failure] = [
    Refused("not here", hint="try there"),
    Unreachable("h1 did not answer"),
    StepFailed("dump", "CRIU could not"),
    ZeroDivisionError("a slip"),
]


def named(way: Failure) -> str:
    return type(way).__name__


def a_job() -> Job:
    """Three capsules, on h0 to h2."""
    run = messages.RunJob("gpt", 3, ["train.py"], {}, "/", 0, [])
    capsules = {
        f"gpt/{i}": Capsule(f"gpt/{i}", i, f"h{i}", 1, started=True, granted=True) for i in range(3)
    }
    return Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)


class SnapshotStage:
    """Answers requests, and writes down all that is asked of it, in order. What concerns the copy
    that a capsule's own host keeps is called HoldOwn and CheckOwn here."""

    cluster = CLUSTER

    def __init__(self) -> None:
        self.said: list[str] = []
        self.asked: list[tuple[str, Message]] = []
        self.fails: dict[str, list[Failure]] = {}
        self.after: dict[str, list[Exception]] = {}
        self.slow: set[str] = set()
        self.silent: set[str] = set()
        self.down: set[str] = set()  # hosts that are not heard
        self.watch: Callable[[str], None] = lambda _line: None
        self.locked: set[str] = set()
        self.over: set[str] = set()
        self.dumped: list[tuple[str, set[str]]] = []  # each capsule, and what was locked then
        self.own: set[tuple[str, str]] = set()  # hosts that were asked for a copy of their capsule
        self.stands = messages.Holding("", base=4, least=9)
        self.gates_closed = False
        self.at = ""  # the migration at the gates
        self.completed: list[Generation] = []
        self.suspended: list[tuple[Generation, str]] = []  # each with why

    def fail(self, what: str, *how: Failure) -> None:
        """The next calls of ``what`` (a message's name, perhaps with a capsule) go so, without an
        effect."""
        self.fails[what] = list(how)

    def lose(self, what: str, *how: Exception) -> None:
        """The next calls of ``what`` have their effect, and their answers are lost."""
        self.after[what] = list(how)

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        assert timeout > 0
        spec = getattr(message, "spec", None)
        capsule = spec.name if spec is not None else getattr(message, "capsule", "")
        kind = type(message).__name__
        if isinstance(message, messages.Hold) and message.own:
            kind = "HoldOwn"
        elif isinstance(message, messages.CheckHeld) and (host, capsule) in self.own:
            kind = "CheckOwn"
        names = (f"{kind} {capsule}", kind)
        self._say(names[0])
        self.asked.append((host, message))
        if names[0] in self.silent:
            await asyncio.sleep(timeout)
        for _ in range(TURNS if names[0] in self.slow else 1):
            await asyncio.sleep(0)
        failed, answer = self._planned(names)
        if failed:
            return answer
        self._act(kind, capsule)
        for name in names:
            if self.after.get(name):
                raise self.after[name].pop(0)
        if kind == "HoldOwn":
            self.own.add((host, capsule))
            return self.stands
        return ANSWERS[type(message)]

    def is_up(self, host: str) -> bool:
        return host not in self.down

    def at_gates(self, job: Job) -> str:
        return self.at

    async def close_gates(self, job: Job) -> str:
        self._say("close gates")
        self.gates_closed = True
        await asyncio.sleep(0)
        self._planned(("close gates",))
        return BOUNDARY

    async def open_gates(self, job: Job) -> str:
        self._say("open gates")
        away = {f"gpt/{host[1:]}" for host in self.down}  # such a host lets it go by itself
        assert self.locked <= away, "the job goes on while a capsule is locked"
        self.gates_closed = False
        return "2 communicators rebuilt"

    def complete(self, generation: Generation) -> None:
        self._say("complete")
        self._planned(("complete",))
        self.completed.append(generation)

    def suspend(self, generation: Generation, why: str, to: str = "") -> None:
        self._say("suspend")
        self._planned(("suspend",))
        self.suspended.append((generation, why))

    def _say(self, line: str) -> None:
        self.said.append(line)
        self.watch(line)

    def _planned(self, names: tuple[str, ...]) -> tuple[bool, Message | None]:
        for name in names:
            if self.fails.get(name):
                how = self.fails[name].pop(0)
                if isinstance(how, Exception):
                    raise how
                return True, how
        return False, None

    def _act(self, kind: str, capsule: str) -> None:
        if kind == "StartSnapshot":
            self.over.discard(capsule)
        elif kind == "LockCapsule":
            self._need_session(capsule)
            self.locked.add(capsule)
        elif kind == "DumpCapsule":
            self._need_session(capsule)
            if capsule not in self.locked:
                raise StepFailed("snapshot", f"{capsule} is not locked")
            self.dumped.append((capsule, set(self.locked)))
        elif kind == "SealSnapshot":
            self._need_session(capsule)
        elif kind in ("ThawCapsule", "CloseSnapshot"):
            self.over.add(capsule)
            self.locked.discard(capsule)

    def _need_session(self, capsule: str) -> None:
        if capsule in self.over:
            raise StepFailed("snapshot", f"s17 is over where {capsule} runs")


def of(stage: SnapshotStage, kind: type[Message]) -> list[tuple[str, Any]]:
    """The host and the message of each request of that kind."""
    return [(host, message) for host, message in stage.asked if isinstance(message, kind)]


def a_snapshot(stage: SnapshotStage, job: Job | None = None, *, suspends: str = "") -> Snapshot:
    job = job or a_job()
    holders = dict.fromkeys(job.capsules, HOLDER)
    return Snapshot(stage, 17, job, holders, suspends=suspends)


def play(stage: SnapshotStage, snapshot: Snapshot | None = None) -> Snapshot:
    """Run it. Whatever happens, no capsule stays locked and the gates are open afterwards."""
    snapshot = snapshot or a_snapshot(stage)
    asyncio.run(snapshot.run())
    assert stage.locked == set(), "a capsule was left locked"
    assert not stage.gates_closed, "the gates were left closed"
    assert snapshot.released.is_set()
    assert (snapshot.generation is None) is (snapshot.error is not None)
    assert isinstance(snapshot.error, LiveshiftError | None)
    return snapshot
