# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's moves with a real fleet and journal, and a stand-in for its agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from fleet_scene import CLUSTER
from journal_rows import OWNERS
from migration_stage import FACTS, SURVEY
from orchestrator_parts import Parts

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message, RunJob
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.steps import MigrationStep

SEATS = tuple(messages.GpuSeat(uuid, "H200", free=True) for uuid in ("GPU-x", "GPU-y"))
RESERVED = messages.Reserved([("CRIU", "4.2.1")], "tcp://10.88.0.12:7401")
Answer = Message | Exception | None


class Hosts:
    """The agents of all hosts: answers what a test says, in turn and the last for good; writes down
    who was asked what. What a test names in ``held`` is answered once that is over."""

    def __init__(self) -> None:
        self.answers: dict[type[Message], list[Answer]] = {
            messages.Inspect: [messages.Inspected(SURVEY, FACTS, 5)],
            messages.Reserve: [RESERVED],
            messages.Settle: [messages.Settled("runs")],
            messages.OpenGate: [messages.TornDown([], 0.0)],
            messages.Locate: [None],
            messages.SettleSwap: [messages.SwapSettled("stays", "")],
            messages.Progress: [messages.Arrived(0, 0, False)],
        }
        self.requests: list[tuple[str, Message]] = []
        self.held: dict[type[Message], asyncio.Event] = {}

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        assert timeout > 0
        self.requests.append((host, message))
        if (event := self.held.get(type(message))) is not None:
            await event.wait()
        await asyncio.sleep(0)
        answers = self.answers.get(type(message), [Unreachable("no answer was arranged")])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def said(self) -> list[str]:
        """Without what is asked beside a move, for what it costs."""
        beside = (messages.StartMeasure, messages.EndMeasure)
        return [
            f"{type(m).__name__} {host}" for host, m in self.requests if not isinstance(m, beside)
        ]

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for _, message in self.requests if isinstance(message, kind)]


class Scene(Parts):
    """Hosts h0 to h2, all up; the job gpt has gpt/0 on h0 and gpt/1 on h1."""

    def __init__(self, state: Path, timeouts: str = "") -> None:
        text = CLUSTER.replace("{state}", str(state)) + timeouts
        self.hosts = Hosts()
        self.over: list[Migration] = []
        super().__init__(Fleet(config.parse(text).cluster), self.hosts, self._over)
        self.job = self.add_job("gpt", 1)
        self.capsule = self.job.capsules["gpt/1"]
        for host in self.fleet.hosts:
            self.hear(host)

    async def _over(self, migration: Migration) -> None:
        self.over.append(migration)

    def add_job(self, name: str, vni: int) -> Job:
        run = RunJob(name, 2, ["true"], {}, "/", 0, [])
        owners = {c.replace("gpt", name): owner for c, owner in OWNERS.items()}
        self.fleet.journal.add_job(name, vni, f"10.99.{vni}.0/24", b"", owners)
        capsules = {c: Capsule(c, n, host, 1, started=True) for c, (n, host) in owners.items()}
        job = Job(name, Overlay(vni, f"10.99.{vni}.0/24"), run, 0, 0.0, capsules)
        self.fleet.jobs[name] = job
        return job

    def hear(self, host: str) -> None:
        self.fleet.hosts[host].heard = time.monotonic()

    def a_move(
        self, number: int, step: MigrationStep, job: Job | None = None, rank: int = 1
    ) -> HostMigration:
        """One that is under way, whose order of things does not run."""
        job = job or self.job
        capsule = job.capsules[f"{job.name}/{rank}"]
        move = HostMigration(self.context, number, Order(job, capsule, "h2", "", "root"))
        move.step = step
        self.fleet.migrations[move.name], capsule.migration = move, move.name
        return move

    def told(self, kind: str, subject: str = "gpt/1") -> list[tuple[str, str, str]]:
        """Words, who and the name of the migration, of that kind of lines of the history."""
        events = self.fleet.journal.events(subject, 0)
        return [
            (e.text, e.by, e.migration.name if e.migration else "")
            for e in events
            if e.kind == kind
        ]

    def state_of(self, number: int) -> str:
        """As an orchestrator that is started again would find it."""
        row = self.fleet.journal.migration(number)
        return row.state if row else "none"

    @property
    def written(self) -> int:
        return self.fleet.journal.file.changes


def play(work: Awaitable[None]) -> None:
    """And end whatever it has left going on."""

    async def whole() -> None:
        try:
            await asyncio.wait_for(work, 15)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(whole())
