# SPDX-License-Identifier: Apache-2.0
"""What an agent answers about swaps of GPUs; notes are real, house and driver stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from gpu_lists import ONE, UUIDS, survey
from swap_doubles import AWAY, NO_ROOM, PAIRS, STUCK, Driver, Tree

from liveshift.criu_glue.capsule import sandboxes
from liveshift.errors import NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent import gpu_swap_handlers
from liveshift.runtime.agent.gpu import host_swap
from liveshift.runtime.agent.gpu.host_swap import Stage, SwapNote
from liveshift.runtime.agent.gpu_swap_handlers import GpuSwapHandlers
from liveshift.runtime.agent.migration_registry import POLL_S, MigrationRegistry
from liveshift.runtime.messages import GpuSurvey, SwapSettled

T = TypeVar("T")
SWAP = messages.SwapGpu("m7", "gpt/3", PAIRS, [1001], 60.0)
SETTLE = messages.SettleSwap("m7", "gpt/3")


class Scene(MigrationRegistry):
    """One capsule, gpt/3, with two CUDA processes; stands in for CapsuleTable and Devices, too."""

    host = "h1"

    def __init__(self, directory: Path) -> None:
        me = cast(Any, self)
        self._busy, self._undecided = set(), set()
        self.driver = Driver()
        self.alive = True
        self.helper = True
        self.full: list[bool] = []
        self.survey: GpuSurvey | None = survey(ONE)
        self.promised: dict[str, str] = {}
        self.gpus_swapped: dict[str, str] = {}
        self.kept: list[dict[str, str]] = []
        stands = SimpleNamespace(
            plan=SimpleNamespace(directory=directory), alive=lambda: self.alive
        )
        spec = SimpleNamespace(name="gpt/3")
        self.here: Any = SimpleNamespace(sandbox=stands, spec=spec, code=None, finished={})
        self.capsules = {"gpt/3": self.here}
        self.devices = me
        self.swapper = GpuSwapHandlers(me, me)

    def resident(self, capsule: str) -> Any:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} is not on h1")
        return self.capsules[capsule]

    free = resident

    async def blocking(self, capsule: str, work: Callable[[], T]) -> T:
        assert capsule == "gpt/3"
        self.kept.append(dict(self.gpus_swapped))
        return work()

    async def survey_gpus(self, resident: Any) -> GpuSurvey | None:
        return self.survey

    def gpus_taken(self) -> dict[str, str]:
        return {**self.promised, **self.gpus_swapped}

    def tree(self, migration: str, resident: Any, *, full: bool, only: Collection[int]) -> Any:
        assert (migration, resident) == ("m7", self.here)
        self.full.append(full)
        (pid,) = only
        return Tree(self.driver, pid) if self.helper else None

    def says(self, answer: Awaitable[T]) -> T:
        async def asked() -> T:
            return await answer

        return asyncio.run(asked())

    def settled(self) -> SwapSettled:
        return self.says(self.swapper.settle_swap(SETTLE))

    def noted(self, stage: Stage, **more: Any) -> None:
        host_swap.write(self.here, SwapNote("m7", stage, PAIRS, [1001], **more))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(gpu_swap_handlers, "finished_by_pid", lambda _: {1001: 12})
    made = Scene(tmp_path)
    monkeypatch.setattr(sandboxes, "end", lambda stands: setattr(made, "alive", False))
    return made


def test_the_plan_changes_nothing(scene: Scene) -> None:
    plan = scene.says(scene.swapper.plan_swap(messages.LookAtGpus("gpt/3", "3", "")))
    assert (plan.leave, plan.to, plan.pids) == ("GPU 1", "GPU 3", [1001])
    scene.promised = {UUIDS[3]: "is promised to llm/0 (m4)"}
    with pytest.raises(Refused, match="is not free: it is promised to llm/0"):
        scene.says(scene.swapper.plan_swap(messages.LookAtGpus("gpt/3", "3", "")))
    assert (scene.driver.done, host_swap.read(scene.here)) == ([], None)


@pytest.mark.parametrize("verify", [False, True])
def test_a_swap_and_what_is_said_of_it(scene: Scene, verify: bool) -> None:
    ask = messages.SwapGpu("m7", "gpt/3", PAIRS, [1001], 60.0, verify)
    moved = scene.says(scene.swapper.swap_gpus(ask))
    assert [phase.name for phase in moved.phases] == ["gpu save", "gpu restore"]
    assert scene.full == [verify]
    assert scene.driver.where == {1001: "new", 1002: "old"}
    assert scene.here.finished == {1001: 12}, "the first collective after it is looked for"
    for _ in range(2):
        assert scene.settled() == SwapSettled("swapped", "")


def test_nobody_gets_the_two_gpus_meanwhile(scene: Scene) -> None:
    scene.driver.fails["new 1001"] = [NO_ROOM]
    with pytest.raises(StepFailed):
        scene.says(scene.swapper.swap_gpus(SWAP))
    words = "is changed for another one by gpt/3 (m7)"
    assert scene.kept == [{"GPU-a": words, "GPU-b": words}]
    assert scene.gpus_swapped == {}


def test_a_gpu_that_was_promised_since_the_plan_is_not_taken(scene: Scene) -> None:
    scene.promised = {"GPU-b": "is promised to llm/0 (m8)"}
    with pytest.raises(Refused, match=r"GPU-b is not free: it is promised to llm/0"):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert (scene.driver.done, scene.gpus_swapped) == ([], {})
    assert scene.settled().state == "stays"


def test_one_that_failed_is_told_with_its_reason(scene: Scene) -> None:
    scene.driver.fails["new 1001"] = [NO_ROOM]
    with pytest.raises(StepFailed, match="out of memory"):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert scene.settled() == SwapSettled("stays", str(NO_ROOM))


def test_one_that_was_lost_is_told_as_such_when_its_sandbox_is_gone(scene: Scene) -> None:
    scene.driver.fails["new 1001"] = [STUCK]
    with pytest.raises(StepFailed):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert not scene.alive
    settled = scene.settled()
    assert settled.state == "lost"
    assert str(STUCK) in settled.why


def test_it_is_never_done_twice(scene: Scene) -> None:
    scene.says(scene.swapper.swap_gpus(SWAP))
    with pytest.raises(Refused, match="m7 is over: swapped"):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert scene.driver.done.count("save 1001") == 1


def test_one_that_comes_after_it_was_settled_is_refused(scene: Scene) -> None:
    assert scene.settled() == SwapSettled("stays", "it had not begun")
    with pytest.raises(Refused, match="m7 is over: it had not begun"):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert scene.driver.done == []


def test_a_later_swap_takes_the_place_of_the_one_before(scene: Scene) -> None:
    host_swap.write(scene.here, SwapNote("m6", Stage.SWAPPED, PAIRS, [], [1001]))
    scene.says(scene.swapper.swap_gpus(SWAP))
    assert scene.settled().state == "swapped"


def test_a_swap_of_nothing_is_refused(scene: Scene) -> None:
    with pytest.raises(Refused, match="no process"):
        scene.says(scene.swapper.swap_gpus(messages.SwapGpu("m7", "gpt/3", PAIRS, [], 60.0)))


@pytest.mark.parametrize("way", ["left", "ended"])
def test_a_capsule_that_is_not_here_is_gone(scene: Scene, way: str) -> None:
    scene.noted(Stage.BRINGING)
    if way == "left":
        scene.capsules.clear()
    scene.alive = False
    assert scene.settled() == SwapSettled("gone", "")
    assert scene.driver.done == []


def test_while_the_helper_is_away_it_is_held(scene: Scene) -> None:
    scene.driver.fails["new 1001"] = [AWAY, AWAY]
    with pytest.raises(Unreachable):
        scene.says(scene.swapper.swap_gpus(SWAP))
    assert scene.settled() == SwapSettled("held", str(AWAY))
    scene.helper = False
    settled = scene.settled()
    assert (settled.state, settled.why) == ("held", "h1 has no GPU helper")
    scene.helper = True
    assert scene.settled() == SwapSettled("swapped", "")


def test_an_answer_waits_for_what_is_under_way(scene: Scene) -> None:
    async def act() -> SwapSettled:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def blocking(capsule: str, work: Callable[[], T]) -> T:
            began.set()
            await go_on.wait()
            return work()

        scene.blocking = blocking  # type: ignore[method-assign]
        swapping = asyncio.create_task(scene.swapper.swap_gpus(SWAP))
        await began.wait()
        with pytest.raises(Refused, match="under way"):
            await scene.swapper.swap_gpus(SWAP)
        settling = asyncio.create_task(scene.swapper.settle_swap(SETTLE))
        assert not (await asyncio.wait({settling}, timeout=5 * POLL_S))[0]
        go_on.set()
        await swapping
        return await settling

    assert asyncio.run(act()) == SwapSettled("swapped", "")


# ---- an agent's next life ----------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "end"), [(Stage.SAVING, "stays"), (Stage.BRINGING, "swapped")])
def test_what_an_earlier_agent_has_left_is_ended(scene: Scene, stage: Stage, end: str) -> None:
    scene.driver.where[1001] = "off"
    scene.noted(stage)
    scene.says(scene.swapper.recover_swaps())
    done = list(scene.driver.done)
    assert scene.driver.where[1001] == ("new" if end == "swapped" else "old")
    assert scene.settled().state == end
    assert scene.driver.done == done


def test_a_helper_that_is_away_does_not_stop_an_agent(scene: Scene) -> None:
    scene.driver.where[1001] = "off"
    scene.driver.fails["new 1001"] = [AWAY]
    scene.noted(Stage.BRINGING)
    scene.says(scene.swapper.recover_swaps())
    assert scene.settled() == SwapSettled("swapped", "")


def test_what_is_over_or_has_ended_is_left_alone(scene: Scene) -> None:
    scene.says(scene.swapper.recover_swaps())
    scene.noted(Stage.STAYS)
    scene.says(scene.swapper.recover_swaps())
    scene.noted(Stage.BRINGING)
    scene.alive = False
    scene.says(scene.swapper.recover_swaps())
    assert scene.driver.done == []
