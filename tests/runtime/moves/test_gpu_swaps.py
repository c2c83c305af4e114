# SPDX-License-Identifier: Apache-2.0
"""How swaps of GPUs begin and end: a real orchestrator and journal, hosts that answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.agents import Agents
from liveshift.runtime.messages import GpuSeat, Message, MigrationRow, RunJob
from liveshift.runtime.migration.order import Order
from liveshift.runtime.model.gpu_asked import GpuAsked
from liveshift.runtime.model.jobs import KILLED, Capsule, Job
from liveshift.runtime.moves.planning import MigrationPlanner
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

PLAN = messages.SwapPlan(
    "GPU 3", "GPU 5", [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")], [1001], 80, [("GPU", "H200")]
)
NO_PLAN = Refused("GPU 5 has 10 GiB free, a/1 needs 80", hint="name another GPU")
ANSWERS: dict[type[Message], Message | LiveshiftError] = {
    messages.LookAtGpus: PLAN,
    messages.Arm: messages.Armed({}, [], 0, []),
    messages.SwapGpu: messages.Moved(0, []),
    messages.SettleSwap: messages.SwapSettled("swapped", ""),
    messages.OpenGate: messages.TornDown([], 0.0),
    messages.Resume: messages.Moved(0, []),
}


class Switchboard:
    """Hosts that answer at once, unless ``held``; ``asked``: what, without the gates' traffic."""

    def __init__(self, *_: Any) -> None:
        self.answers = dict(ANSWERS)
        self.held: dict[type[Message], asyncio.Event] = {}
        self.asked: list[str] = []

    async def request(self, host: str, message: Message, _timeout: float) -> Message:
        if not isinstance(message, (messages.Arm, messages.OpenGate)):
            self.asked.append(f"{type(message).__name__} {host}")
        if type(message) in self.held:
            await self.held[type(message)].wait()
        answer = self.answers[type(message)]
        if isinstance(answer, LiveshiftError):
            raise answer
        return answer


class Scene:
    """An orchestrator with a job of three: a/0 on h0, a/1 and a/2 on h1; all hosts are up."""

    def __init__(self, state: Path) -> None:
        text = CLUSTER.replace("{state}", str(state)) + "[timeouts]\ngrace = 0.01\n"
        cluster = config.parse(text).cluster
        board: Any = Switchboard()
        self.brain = Orchestrator(cluster, board)
        self.fleet, self.migrations = self.brain.fleet, self.brain.migrations
        self.planner = MigrationPlanner(self.fleet, Agents(self.fleet, board))
        self.board: Switchboard = board
        if not self.fleet.jobs:
            self._add_job()
        self.job = self.fleet.jobs["a"]
        for host in self.fleet.hosts.values():
            host.heard = time.monotonic()

    def _add_job(self) -> None:
        run, subnet = RunJob("a", 3, ["true"], {}, "/", 0, []), "10.99.0.0/24"
        capsules = {f"a/{n}": Capsule(f"a/{n}", n, f"h{(n + 1) // 2}", 1) for n in range(3)}
        spec = msgspec.msgpack.encode({"uid": 0, "run": msgspec.to_builtins(run)})
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        self.fleet.journal.add_job("a", 1, subnet, spec, owners)
        self.fleet.jobs["a"] = Job("a", Overlay(1, subnet), run, 0, 0.0, capsules)

    def begin(self, capsule: str = "a/1", to: str = "5") -> str:
        return self.migrations.start(self.order(capsule, to)).name

    def order(self, capsule: str = "a/1", to: str = "5") -> Order:
        gpu = GpuAsked("h1", to, "")
        return Order(self.job, self.job.capsules[capsule], "", "ECC errors", "root", gpu)

    def row(self, name: str = "m1") -> MigrationRow:
        row = self.fleet.journal.migration(int(name[1:]))
        assert row is not None
        return row

    def told(self) -> list[tuple[str, str]]:
        return [(event.kind, event.text) for event in self.fleet.journal.events("a/1", 0)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def play(act: Callable[[], Awaitable[None]]) -> None:
    """To the end of all that it has set in motion."""

    async def all_of_it() -> None:
        await act()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    asyncio.run(all_of_it())


def begun(scene: Scene, **ask: str) -> None:
    async def act() -> None:
        scene.begin(**ask)

    play(act)


@pytest.mark.parametrize("to", ["5", "GPU-12ab"])
def test_a_swap_is_recorded_and_told(scene: Scene, to: str) -> None:
    begun(scene, to=to)
    assert scene.board.asked == ["LookAtGpus h1", "SwapGpu h1", "Resume h1"]
    row = scene.row()
    assert (row.kind, row.source, row.destination) == ("swap", "h1 GPU 3", "h1 GPU 5")
    assert (row.state, row.epoch, row.reason, row.by) == ("done", 1, "ECC errors", "root")
    asked = to if to.startswith("GPU") else f"GPU {to}"
    # Where it stood is written a little later, which can be after the end of so short a move.
    first, *_, last = [event for event in scene.told() if event[0] != "boundary"]
    assert first == ("move", f"m1 begins: h1 → h1 {asked} (as asked): ECC errors")
    assert last[0] == "moved"
    assert last[1].startswith("moved h1 GPU 3 → h1 GPU 5: paused ")
    assert "image" not in last[1]
    capsule = scene.job.capsules["a/1"]
    assert (capsule.host, capsule.epoch, capsule.migration) == ("h1", 1, None)


def test_one_at_a_time(scene: Scene) -> None:
    """A capsule is in one migration at most, whichever sort; others of its job may move beside."""
    job, capsule = scene.job, scene.job.capsules["a/1"]

    async def act() -> None:
        gate = scene.board.held[messages.SwapGpu] = asyncio.Event()
        scene.begin()
        while "SwapGpu h1" not in scene.board.asked:
            await asyncio.sleep(0)
        for again in (
            lambda: scene.begin(),
            lambda: scene.migrations.start(Order(job, capsule, "h2")),
        ):
            with pytest.raises(Refused, match=r"moving already \(m1\)"):
                again()
        with pytest.raises(Refused, match="moving already"):
            await scene.planner.plan(Order(job, capsule, gpu=GpuAsked("h1", "5", "")))
        assert scene.begin("a/2", "6") == "m2"
        status = [row.name for row in (move.row() for move in scene.fleet.under_way())]
        assert status == ["m1", "m2"]
        assert [view.used for view in scene.fleet.views()] == [1, 2, 0], "it takes no other slot"
        gate.set()

    play(act)
    assert [scene.row(name).state for name in ("m1", "m2")] == ["done", "done"]


def test_a_host_that_is_away_is_not_asked(scene: Scene) -> None:
    scene.fleet.hosts["h1"].heard = 0.0
    with pytest.raises(Unreachable, match="the agent on h1"):
        begun(scene)
    assert scene.board.asked == []


def test_a_gpu_that_its_host_does_not_have_begins_nothing(scene: Scene) -> None:
    scene.fleet.hosts["h1"].gpus = tuple(GpuSeat(f"GPU-{n}2ab", "H200", free=True) for n in (0, 1))
    for to in ("5", "GPU-5"):
        with pytest.raises(NotFound, match=f'h1 has no GPU "{to}"'):
            begun(scene, to=to)
    assert scene.board.asked == []
    assert scene.told() == []
    begun(scene, to="GPU-1")
    assert scene.row().state == "done"


def test_a_refusal_changes_nothing(scene: Scene) -> None:
    scene.board.answers[messages.LookAtGpus] = NO_PLAN
    begun(scene)
    assert scene.board.asked == ["LookAtGpus h1"]
    row = scene.row()
    assert (row.state, row.error, row.hint) == ("failed", str(NO_PLAN), NO_PLAN.hint)
    assert (row.source, row.destination, row.frozen_s) == ("h1", "h1 GPU 5", 0)
    assert scene.told()[-1] == ("not moved", f"did not move h1 → h1 GPU 5, failed: {NO_PLAN}")


def test_lost_device_state_ends_the_job(scene: Scene) -> None:
    scene.board.answers[messages.SwapGpu] = StepFailed("restore", "out of memory")
    scene.board.answers[messages.SettleSwap] = messages.SwapSettled("lost", "it is stuck")
    for word in (messages.Signal, messages.End):
        scene.board.answers[word] = PLAN

    async def act() -> None:
        """The others of the job hear that it ends, and end."""
        scene.begin()
        while not {"Signal h0", "Signal h1"} <= set(scene.board.asked):
            await asyncio.sleep(0.001)
        for capsule in scene.job.capsules.values():
            if capsule.code is None:
                scene.brain.endings.capsule_ended(scene.job, capsule, 143)

    play(act)
    assert (scene.row().state, scene.row().error) == ("lost", "it is stuck")
    assert scene.job.capsules["a/1"].code == KILLED
    assert scene.job.code == KILLED


def test_the_plan(scene: Scene) -> None:
    capsule = scene.job.capsules["a/1"]
    plan = asyncio.run(scene.planner.plan(Order(scene.job, capsule, gpu=GpuAsked("h1", "5", ""))))
    assert (plan.source, plan.destination) == ("h1 GPU 3", "h1 GPU 5")
    assert (plan.checks, plan.image_bytes, plan.carried_bytes) == (PLAN.checks, 0, 0)
    assert scene.board.asked == ["LookAtGpus h1"]
    assert scene.fleet.migrations == {}
    scene.board.answers[messages.LookAtGpus] = NO_PLAN
    with pytest.raises(Refused, match="10 GiB"):
        asyncio.run(scene.planner.plan(Order(scene.job, capsule, gpu=GpuAsked("h1", "5", ""))))


@pytest.mark.parametrize(("settled", "state"), [("swapped", "done"), ("stays", "failed")])
def test_after_a_restart_its_host_says_what_became_of_it(
    scene: Scene, tmp_path: Path, settled: str, state: str
) -> None:
    async def killed() -> None:
        scene.board.held[messages.SwapGpu] = asyncio.Event()
        scene.begin()
        while "SwapGpu h1" not in scene.board.asked:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(killed())
    assert scene.row().state == "freezing"
    again = Scene(tmp_path)
    again.board.answers[messages.SettleSwap] = messages.SwapSettled(settled, "")

    async def act() -> None:
        again.migrations.recover()
        assert again.job.capsules["a/1"].migration == "m1"

    play(act)
    assert again.board.asked[0] == "SettleSwap h1"
    row = again.row()
    assert (row.state, row.kind, row.source) == (state, "swap", "h1 GPU 3")
    assert row.frozen_s > 0
    assert ("moving", "the orchestrator was restarted while it was freezing") in again.told()
