# SPDX-License-Identifier: Apache-2.0
"""What a DeviceTree makes of a helper that has outlived an agent: a stand-in for the helper."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from liveshift.cuda_snapshot.checkpoint import CudaState
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.threads import stop, stopped
from liveshift.errors import LiveshiftError, StepFailed, Unreachable, from_wire, to_wire
from liveshift.runtime.agent.gpu.cuda_processes import CudaProcess
from liveshift.runtime.agent.gpu.device_state import DeviceLost, SavedDevices
from liveshift.runtime.agent.gpu.devices import Devices, DeviceTree
from liveshift.runtime.agent.gpu.stopped_processes import StoppedProcesses
from liveshift.runtime.agent.host.running_capsule import RunningCapsule
from liveshift.runtime.model.stopwatch import Stopwatch

ONE, OTHER = CudaProcess(101, 1001, None), CudaProcess(102, 1002, None)


class Helper:
    """``memory`` by key; ``holding`` are pids whose threads it holds."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.holding: set[int] = set()
        self.states = dict.fromkeys((101, 102), CudaState.RUNNING)
        self.needed: list[object] = []
        self.fails: LiveshiftError | None = None
        self.asked: list[str] = []

    def held(self) -> dict[str, int]:
        return dict(self.memory)

    def drop(self, key: str) -> None:
        self.memory.pop(key, None)

    def holds(self, pid: int) -> bool:
        return pid in self.holding

    def hold(self, pid: int) -> None:
        self.asked.append("hold")
        self.holding.add(pid)

    def state(self, pid: int) -> CudaState | None:
        assert not stopped(pid), "the driver would not answer"
        self.asked.append("state")
        return self.states.get(pid)

    def release(self, pid: int) -> None:
        if self.fails is not None:
            failed, self.fails = self.fails, None
            raise failed
        self.holding.discard(pid)

    def restore(self, pid: int, gpus: object, *, needed: object) -> None:
        self.needed.append(needed)
        self.states[pid] = CudaState.LOCKED

    def unlock(self, pid: int) -> None:
        self.states[pid] = CudaState.RUNNING


class Tree(DeviceTree):
    """Of ``ONE`` and ``OTHER``, as far as they live."""

    living: tuple[CudaProcess, ...] = (ONE, OTHER)

    @contextmanager
    def _processes(self, of: object = ()) -> Iterator[list[CudaProcess]]:
        yield list(self.living)

    def _pids(self, of: Collection[int]) -> list[int]:
        return [each.pid for each in self.living if each.inner in of]


@pytest.fixture
def helper() -> Helper:
    return Helper()


@pytest.fixture
def tree(helper: Helper, tmp_path: Path) -> Tree:
    plan = SimpleNamespace(directory=tmp_path)
    capsule = SimpleNamespace(sandbox=SimpleNamespace(plan=plan))
    return Tree(cast(RunningCapsule, capsule), cast(GpuHelper, helper), "m7", 1.0)


def test_memory_of_a_process_that_ended_meanwhile_is_not_kept(helper: Helper, tree: Tree) -> None:
    helper.memory = {"m7/1003": 5, "m7/warm": 0, "m8/1003": 6}
    tree.bring_back(Stopwatch())
    assert helper.memory == {"m8/1003": 6}


def test_without_a_table_the_helper_knows_what_a_restore_needs(helper: Helper, tree: Tree) -> None:
    """An agent that was started anew: {} would have the room not checked at all."""
    helper.states[101] = CudaState.CHECKPOINTED
    tree.bring_back(Stopwatch())
    helper.states[101] = CudaState.CHECKPOINTED
    tree.saved.append(SavedDevices(1001, used={"GPU-a": 70}))
    tree.bring_back(Stopwatch())
    assert helper.needed == [None, {"GPU-a": 70}]


def test_a_process_that_the_driver_does_not_know_is_not_passed_over(
    helper: Helper, tree: Tree
) -> None:
    del helper.states[101]
    helper.memory = {"m7/1001": 5}
    with pytest.raises(StepFailed, match="process 1001: the driver does not know it"):
        tree.bring_back(Stopwatch())
    assert helper.memory == {"m7/1001": 5}


def test_what_an_earlier_agent_left_held_is_let_go(helper: Helper, tree: Tree) -> None:
    tree.saved += [SavedDevices(1001), SavedDevices(1002)]
    helper.holding = {101, 102}
    tree.recover_held()
    helper.fails = Unreachable("the GPU helper does not answer")  # for one of them
    with pytest.raises(Unreachable):
        tree.end()
    assert len(helper.holding) == 1
    with pytest.raises(StepFailed, match="only 1 of 2 processes are held"):
        tree.recover_held()
    tree.recover_held(some=True)
    tree.end()
    assert not helper.holding


def test_device_state_that_is_lost_is_a_failed_step_to_the_orchestrator() -> None:
    error = from_wire(*to_wire(DeviceLost("gpu restore", "its CUDA state has failed")))
    assert type(error) is StepFailed


class Watch:
    def __init__(self, helper: Helper | None) -> None:
        self._helper = helper

    def present(self) -> bool:
        return True

    def helper(self) -> Any:
        return self._helper


def test_memory_of_migrations_that_nobody_knows_is_dropped(helper: Helper) -> None:
    helper.memory = {"m7/1001": 5, "m7/warm": 0, "m17/1001": 6}
    devices = Devices(cast(Any, Watch(helper)), cast(Any, None))
    assert devices.drop_all_but(lambda: {"m7"})
    assert helper.memory == {"m7/1001": 5, "m7/warm": 0}
    assert not Devices(cast(Any, Watch(None)), cast(Any, None)).drop_all_but(set)


# ---- processes that are stopped ----------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def alone(tree: Tree, helper: Helper, pid: int) -> None:
    """The process is the tree's only one, and the driver knows it. Its pid inside is the same."""
    tree.living = (CudaProcess(pid, pid, None),)
    helper.states[pid] = CudaState.RUNNING


def test_what_a_user_has_stopped_is_refused_and_stays_stopped(
    helper: Helper, tree: Tree, sleeper: int
) -> None:
    alone(tree, helper, sleeper)
    stop(sleeper, 5.0)
    with pytest.raises(StepFailed, match=rf"process {sleeper} is stopped \(SIGSTOP\)"):
        tree.save(Stopwatch())
    tree.bring_back(Stopwatch())
    assert stopped(sleeper)
    assert not helper.asked, "the driver would not have answered"


def test_what_a_user_has_stopped_gets_its_memory_once_it_goes_on(
    helper: Helper, tree: Tree, sleeper: int
) -> None:
    alone(tree, helper, sleeper)
    helper.memory = {f"m7/{sleeper}": 5}
    stop(sleeper, 5.0)
    with pytest.raises(StepFailed, match="is stopped"):
        tree.bring_back(Stopwatch())
    assert helper.memory, "it is the only copy"
    os.kill(sleeper, signal.SIGCONT)


def test_what_a_move_has_stopped_goes_on_also_when_another_agent_brings_it_back(
    helper: Helper, tree: Tree, sleeper: int, tmp_path: Path
) -> None:
    alone(tree, helper, sleeper)
    helper.states[sleeper] = CudaState.CHECKPOINTED
    StoppedProcesses(tmp_path).add(sleeper)
    stop(sleeper, 5.0)
    assert tree.off_gpus()
    tree.bring_back(Stopwatch())
    assert not stopped(sleeper)
    assert helper.asked == ["hold", "state"], "held before it goes on, and asked afterwards"
    assert helper.states[sleeper] is CudaState.RUNNING
    assert not StoppedProcesses(tmp_path).read()


def test_a_swap_of_one_process_leaves_the_others_alone(
    helper: Helper, tree: Tree, sleeper: int, tmp_path: Path
) -> None:
    alone(tree, helper, sleeper)
    tree.only = {sleeper + 1}
    StoppedProcesses(tmp_path).add(sleeper)
    stop(sleeper, 5.0)
    tree.bring_back(Stopwatch())
    assert stopped(sleeper)
    assert StoppedProcesses(tmp_path).read() == {sleeper: []}
