# SPDX-License-Identifier: Apache-2.0
"""A job loses a host and is taken back, with a real journal and the real judge of claims; hosts
are stand-ins that answer as agents do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fleet_scene import a_fleet
from orchestrator_parts import Parts
from rewind_scene import FACTS, SURVEY

from liveshift.errors import NotFound, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import reach
from liveshift.runtime.messages import CapsuleState, Message
from liveshift.runtime.model.jobs import KILLED, Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.orchestrator.endings import Endings
from liveshift.runtime.orchestrator.fleet import Fleet
from liveshift.runtime.orchestrator.rewinds import Rewinds
from liveshift.runtime.orchestrator.stopping import Stopping

BRISK = "[timeouts]\nsuspicion = 0.6\nheartbeat = 0.05\n"


class Scene:
    """The job a, on h0 and h1; h2 holds its newest snapshot. ``alive``: the hosts whose agents are
    heard. ``kernels``: those that answer a connection. ``stuck``: what is never answered."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = {"h0", "h1", "h2"}
        self.kernels = {"h0", "h1", "h2"}
        self.images = True
        self.stuck: set[str] = set()
        self.said: list[str] = []
        fleet = a_fleet(state, BRISK)
        for capsule in fleet.jobs["a"].capsules.values():
            capsule.started = True
        self.take_snapshot(fleet)
        self.begin(fleet)
        addresses = {str(host.data): host.name for host in fleet.cluster.hosts}

        async def answers(address: str, _limit: float) -> bool:
            await asyncio.sleep(0.01)
            return addresses[address] in self.kernels

        monkeypatch.setattr(reach, "answers", answers)

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

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        work = [asyncio.ensure_future(each) for each in (self.rewinds.run(), self._beat())]
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            for host in self.alive:
                self.fleet.hosts[host].heard = time.monotonic()
            await asyncio.sleep(0.01)

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
            if not self.images:
                raise NotFound(f"{host} has no {message.image}")
            return messages.HeldFacts(SURVEY, FACTS, 1000)
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
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_dead_host_s_capsule_goes_to_its_holder_and_all_go_back(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.job.book().rewinds == 1
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}
    (why,) = scene.history("rewinding")
    assert why == "goes back to s1: h1 is silent, and so is its kernel"
    assert scene.said.index("EndEarlier h0") < scene.said.index("Reserve h0")
    assert scene.fleet.journal.snapshots.rewinds_under_way() == []
    again = Fleet(scene.fleet.cluster).jobs["a"]
    assert (again.state, again.rewinds) == ("running", 1)


def test_an_agent_that_is_away_leads_to_nothing(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.alive.remove("h1")
            await asyncio.sleep(2.0)

    asyncio.run(play())
    assert "GetHeld h2" not in scene.said
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_a_job_that_trains_on_is_left_alone(scene: Scene) -> None:
    def state(count: int) -> CapsuleState:
        return CapsuleState("a/0", 1, 2, 0, count, 1.0, [0], "true")

    async def play() -> None:
        capsule = scene.job.capsules["a/0"]
        async with scene.at_work():
            scene.cut("h1")
            for count in range(200):
                scene.rewinds.note_heartbeat(capsule, seen := state(count))
                capsule.seen = seen
                await asyncio.sleep(0.01)
            assert scene.owners()["a/1"] == ("h1", 1, True)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True), "it was, until it stood still"


def test_a_host_that_came_back_without_a_capsule_has_lost_it(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][1] == 3
    assert scene.history("rewinding") == ["goes back to s1: h1 came back without a/1"]


def test_a_job_without_a_snapshot_ends_as_ever(scene: Scene) -> None:
    scene.job.newest = None
    capsule = scene.job.capsules["a/1"]
    assert not scene.rewinds.host_lost("h1", scene.job, capsule)
    assert not scene.rewinds.takes_back(scene.job, capsule, 1)


def test_what_fails_beside_a_silent_host_is_not_recorded_yet(scene: Scene) -> None:
    async def play() -> None:
        job, capsule = scene.job, scene.job.capsules["a/0"]
        async with scene.at_work():
            await asyncio.sleep(0.8)
            assert not scene.rewinds.takes_back(job, capsule, 1), "nothing is silent"
            scene.cut("h1")
            await asyncio.sleep(0.3)
            assert scene.rewinds.takes_back(job, capsule, 1)
            assert not scene.rewinds.takes_back(job, capsule, 0), "it has ended well"
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await asyncio.sleep(0.1)
            assert not scene.rewinds.takes_back(job, capsule, 1), "it fails by itself"

    asyncio.run(play())


def test_a_job_waits_for_a_holder_and_nothing_of_it_is_ended(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1", "h2")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.3)
            (why,) = scene.history("rewinding")
            assert why.startswith("waits: no host that holds")
            assert scene.owners()["a/1"] == ("h1", 1, True)
            scene.alive.add("h2")
            scene.kernels.add("h2")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True)


def test_an_image_that_is_gone_ends_only_what_is_certainly_lost(scene: Scene) -> None:
    async def play() -> None:
        scene.images = False
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.1)
            assert scene.job.capsules["a/1"].code is None, "h1 may come back with it"
            assert not scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert "the image of a/0, is gone" in why


def test_a_restarted_orchestrator_goes_on(scene: Scene) -> None:
    async def begins() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)

    async def goes_on() -> None:
        scene.stuck = set()
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(begins())
    scene.begin(Fleet(scene.fleet.cluster))
    assert scene.job.state == "rewinding"
    asyncio.run(goes_on())
    assert scene.job.state == "running"
    assert scene.job.rewinds == 1, "the same rewind"
    assert {host for host, _, granted in scene.owners().values() if granted} == {"h0", "h2"}


def test_a_job_that_is_stopped_meanwhile_ends(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert not scene.history("rewound")
