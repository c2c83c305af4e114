# SPDX-License-Identifier: Apache-2.0
"""A job that is suspended and resumed, with a real journal, real snapshots and rewinds, and the
real judge of claims; hosts and gates are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rewind_scene import FACTS, SURVEY
from rewinds_scene import BRISK, RewindsScene

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import Message, ResumptionOrdered, SuspensionOrdered
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.protection import ordered_snapshots, protection, suspensions
from liveshift.runtime.protection.job_snapshots import JobSnapshots
from liveshift.runtime.protection.ordered_snapshots import OrderedSnapshots
from liveshift.runtime.protection.protection import Protection
from liveshift.runtime.protection.saved_jobs import SavedJobs
from liveshift.runtime.protection.suspensions import Suspensions
from liveshift.runtime.quiesce.gates import Boundary
from liveshift.runtime.snapshot.directory_images import DirectoryImages

BOUNDARY = "paused after collective 7"
ALL_BUT_ONE = {"h0": 3, "h1": 3, "h2": 4}
"""Then a resumed job has one capsule on h0 and one on h1."""

ANSWERS: dict[type[Message], Message | None] = {
    messages.Inspect: messages.Inspected(SURVEY, FACTS, 5),
    messages.Hold: messages.Holding("tcp://h2:7401", base=0, least=0),
    messages.StartSnapshot: messages.Moved(10, []),
    messages.LockCapsule: None,
    messages.DumpCapsule: messages.Frozen(1000, []),
    messages.ThawCapsule: None,
    messages.SealSnapshot: messages.SnapshotClosed(b"digest"),
    messages.CloseSnapshot: messages.SnapshotClosed(b"digest"),
    messages.CheckHeld: messages.Held(100),
}


def idle(_: object) -> None:
    pass


class SuspensionsScene(RewindsScene):
    """The job a on h0 and h1, with its snapshot s1; the next one is its last. ``fails``: what the
    next requests of a kind meet, or of "kind host" or "kind capsule". ``held``: those that wait for
    an event. ``restored``: each host that has restored a capsule, and which. ``copies``: whether
    images are copied to second hosts, which has tests of its own."""

    copies = False
    settings = f"{BRISK}[snapshots]\nevery = 3600\n"

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: dict[str, list[Exception]] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.restored: list[tuple[str, str]] = []
        monkeypatch.setattr(protection, "TICK_S", 0.01)
        monkeypatch.setattr(suspensions, "TICK_S", 0.01)
        monkeypatch.setattr(ordered_snapshots, "TICK_S", 0.01)
        super().__init__(state, monkeypatch)
        for host in self.fleet.hosts.values():
            host.heard = time.monotonic()

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        images = DirectoryImages(fleet.cluster, self.rewinds.request)
        self.snapshots = JobSnapshots(fleet, self.parts.context, images)
        self.protection = Protection(fleet, self.parts.context, self.snapshots)
        self.ordered = OrderedSnapshots(fleet, self.snapshots, images)
        self.saved = SavedJobs(fleet, images, self.endings)
        self.suspensions = Suspensions(fleet, self.ordered, self.rewinds, self.endings, self.saved)
        if not self.copies:
            none = SimpleNamespace(copy_what_is_alone=idle, forget=idle)
            self.suspensions._second = cast(Any, none)

    def restart(self) -> None:
        """Another orchestrator on the same journal."""
        self.begin(Fleet(self.fleet.cluster))

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        self.snapshots.recover()
        self.ordered.recover()
        parts = (self.protection, self.ordered, self.suspensions)
        return [*super().loops(), *(part.run() for part in parts)]

    def order(self) -> SuspensionOrdered:
        return self.suspensions.suspend("root", self.job, dry_run=False)

    async def suspend(self) -> None:
        """Suspend the job, and wait until it runs nowhere."""
        done = len(self.history("suspended"))
        self.order()
        await self.until(lambda: len(self.history("suspended")) > done)

    async def resume(self) -> ResumptionOrdered:
        return await self.suspensions.resume("root", self.job, dry_run=False)

    def kinds(self) -> list[str]:
        """The kinds of the job's events, each once in a row; without those about snapshots, which
        are taken again after a resumption."""
        events = self.fleet.journal.events("a", 0)
        others = ("protected", "unprotected", "snapshot")
        found = [e.kind for e in events if e.subject == "a" and e.kind not in others]
        return [kind for n, kind in enumerate(found) if n == 0 or found[n - 1] != kind]

    def another_job(self, slots: dict[str, int]) -> None:
        """Another job takes so many slots of each host."""
        hosts = [host for host, count in slots.items() for _ in range(count)]
        capsules = {f"b/{n}": Capsule(f"b/{n}", n, host, 1) for n, host in enumerate(hosts)}
        run = messages.RunJob("b", len(hosts), ["true"], {}, "/", 0, [])
        self.fleet.jobs["b"] = Job("b", Overlay(2, "10.99.1.0/24"), run, 0, 0.0, capsules)

    def asked(self, kind: str) -> list[str]:
        """The hosts that got a request of this kind, in order."""
        return [line.split()[1] for line in self.said if line.split()[0] == kind]

    def ended_on(self) -> set[str]:
        """The hosts that were asked to end earlier copies."""
        return set(self.asked("EndEarlier"))

    def claim(self, host: str, capsule: str, epoch: int, side: str = "leaving") -> str:
        """The ruling on a copy from before the suspension."""
        claim = messages.Claim("m9", capsule, side, epoch, ready=True, rewinds=0)
        return self.parts.claims.rule(host, claim).ruling

    # ---- the switchboard and the gates ----

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        kind, capsule = type(message).__name__, getattr(message, "capsule", "")
        for name in (f"{kind} {host}", f"{kind} {capsule}", kind):
            if name in self.held:
                self.said.append(f"{kind} {host}")
                await self.held[name].wait()
                if host not in self.alive:
                    raise Unreachable(f"{host} does not answer")
            if self.fails.get(name):
                self.said.append(f"{kind} {host}")
                raise self.fails[name].pop(0)
        answer = await super().request(host, message, limit)
        if isinstance(message, messages.RestoreCapsule):
            self.restored.append((host, capsule))
        return ANSWERS.get(type(message), answer)

    async def close(self, _job: Job, _limits: object, *, shared: bool) -> Boundary:
        assert not shared
        self.said.append("close")
        return Boundary(BOUNDARY)

    def forget(self, job: str) -> None:
        self.said.append(f"forget {job}")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuspensionsScene:
    return SuspensionsScene(tmp_path, monkeypatch)
