# SPDX-License-Identifier: Apache-2.0
"""A job that may be rewound, with a real journal and the real judge of claims; hosts are stand-ins
that answer as agents do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from fleet_scene import a_fleet
from orchestrator_parts import Parts
from rewind_scene import FACTS, SURVEY

from liveshift.errors import NotFound, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control.kernels import Kernels
from liveshift.runtime.fleet.endings import Endings
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.fleet.stopping import Stopping
from liveshift.runtime.messages import CapsuleEnded, Message
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.protection.rewinds import Rewinds

FAULT_S = 0.7
BRISK = f"[timeouts]\nsuspicion = 0.6\nheartbeat = 0.05\nfault = {FAULT_S}\n"


def ended(capsule: Capsule, code: int, signum: int = 0, collectives: int = 0) -> CapsuleEnded:
    return CapsuleEnded(capsule.name, capsule.epoch, code, signum, collectives)


class RewindsScene:
    """The job a, on h0 and h1; h2 holds its newest snapshot. ``alive``: the hosts whose agents are
    heard. ``kernels``: those that answer a connection. ``stuck``: what is never answered."""

    settings = BRISK

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = {"h0", "h1", "h2"}
        self.kernels = {"h0", "h1", "h2"}
        self.images = True
        self.compared: list[str] = []  # hosts that had to compare an image
        self.damaged: set[str] = set()  # hosts whose images turn out to be damaged then
        self.own_copies: set[str] = set()  # hosts that have kept copies of their own capsules
        self.stuck: set[str] = set()
        self.ran_on: dict[str, list[str]] = {}  # by host: capsules that it ends, and that run
        self.written: dict[bytes, int] = {}  # files that the capsules were writing
        self.said: list[str] = []
        fleet = a_fleet(state, self.settings)
        for capsule in fleet.jobs["a"].capsules.values():
            capsule.started = True
        self.take_snapshot(fleet)
        self.begin(fleet)
        addresses = {str(host.data): host.name for host in fleet.cluster.hosts}

        async def answers(_: Kernels, address: str, _limit: float) -> bool:
            await asyncio.sleep(0.01)
            return addresses[address] in self.kernels

        monkeypatch.setattr(Kernels, "answers", answers)

    def begin(self, fleet: Fleet) -> None:
        """An orchestrator on this fleet."""
        self.fleet = fleet
        self.parts = Parts(fleet, self, gates=self)
        stopping = Stopping(fleet, cast(Any, self))
        self.endings = Endings(fleet, cast(Any, self), stopping)
        self.stopping = stopping
        self.rewinds = Rewinds(
            fleet,
            self.parts.agents,
            self.parts.address_book,
            self.parts.context,
            cast(Any, self),
            self.endings,
        )

    @property
    def job(self) -> Job:
        return self.fleet.jobs["a"]

    def take_snapshot(self, fleet: Fleet) -> None:
        job, tables = fleet.jobs["a"], fleet.journal.snapshots
        owners = {c.name: (c.host, c.epoch) for c in job.capsules.values()}
        holders = {name: ["h2"] for name in owners}
        number = tables.begin_snapshot("a")
        job.newest = Generation(number, "a", "step 9", time.time(), job.rewinds, owners, holders)
        tables.complete_snapshot(job.newest)
        job.goes_on_from(time.monotonic())

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        work = [asyncio.ensure_future(each) for each in self.loops()]
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What the orchestrator does by itself, and the hosts' heartbeats."""
        return [self.rewinds.run(), self._beat()]

    async def _beat(self) -> None:
        while True:
            for host in self.alive:
                self.fleet.hosts[host].heard = time.monotonic()
            await asyncio.sleep(0.01)

    def end(self, name: str, code: int, signum: int = 0, collectives: int = 0) -> CapsuleEnded:
        """How a command ends under the present epoch."""
        return ended(self.job.capsules[name], code, signum, collectives)

    def report(self, end: CapsuleEnded) -> bool:
        """An agent reports an end. Returns whether it has to report it again."""
        capsule = self.job.capsules[end.capsule]
        if end.epoch != capsule.epoch:  # the orchestrator does not even look at it
            return False
        return self.rewinds.takes_back(self.job, capsule, end)

    def died(self) -> list[dict[str, int]]:
        """The capsules that the job's rewinds are put down to."""
        return [row.died for row in self.fleet.journal.snapshots.history("a")]

    def ask(self, **options: Any) -> None:
        """As if the job had been started with these options."""
        self.job.request = msgspec.structs.replace(self.job.request, **options)

    def cut(self, *hosts: str) -> None:
        self.alive -= set(hosts)
        self.kernels -= set(hosts)

    async def until(self, look: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not look():
                await asyncio.sleep(0.01)

    def history(self, kind: str) -> list[str]:
        return [e.text for e in self.fleet.journal.events("a", 0) if e.kind == kind]

    def owners(self) -> dict[str, tuple[str, int, bool]]:
        """As memory has them; the journal must say the same."""
        rows = self.fleet.journal.capsules("a")
        kept = {name: (host, epoch, bool(g)) for name, _, _, host, epoch, _, g in rows}
        assert kept == {c.name: (c.host, c.epoch, c.granted) for c in self.job.capsules.values()}
        return kept

    # ---- the switchboard and the gates ----

    async def request(self, host: str, message: Message, _limit: float) -> Message | None:
        kind = type(message).__name__
        self.said.append(f"{kind} {host}")
        if host not in self.alive:
            raise Unreachable(f"{host} does not answer")
        if kind in self.stuck:
            await asyncio.Event().wait()
        if isinstance(message, messages.GetHeld):
            found = self.job.newest.holders if self.job.newest else {message.capsule: []}
            holders = found.get(message.capsule, ["h2"])  # moved, and not ruled on yet
            held = self.images and host in holders
            self.compared += [host] if message.compare else []
            if message.compare and host in self.damaged:
                raise NotFound(f"the image {message.image} is damaged")
            if not held and host not in self.own_copies:
                raise NotFound(f"{host} has no {message.image}")
            return messages.HeldFacts(SURVEY, FACTS, 1000, written=self.written)
        if isinstance(message, messages.EndEarlier):
            return messages.EarlierEnded(self.ran_on.get(host, []))
        if isinstance(message, messages.CutBack):
            return messages.CutBackDone(["/shared/log (by 2 kB)"], [])
        if isinstance(message, messages.TryHosts):
            return messages.HostsReached([each for each in message.hosts if each in self.kernels])
        if isinstance(message, messages.Reserve):
            return messages.Reserved([], f"tcp://{host}:7401")
        if isinstance(message, messages.ForwardHeld):
            return messages.Frozen(1000, [])
        if isinstance(message, messages.RestoreCapsule):
            claim = messages.Claim(
                message.migration,
                message.capsule,
                "coming",
                message.epoch,
                ready=True,
                rewinds=self.job.rewinds,
            )
            assert self.parts.claims.rule(host, claim).ruling == "run"
            return messages.Moved(1000, [])
        return None

    def opened(self, _job: Job) -> float:
        return 0.0

    async def open(self, job: Job, _limits: object) -> str:
        assert all(capsule.granted for capsule in job.capsules.values())
        self.said.append("open")
        return ""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewindsScene:
    return RewindsScene(tmp_path, monkeypatch)
