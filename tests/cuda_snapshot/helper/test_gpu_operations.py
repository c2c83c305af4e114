# SPDX-License-Identifier: Apache-2.0
"""What the GPU helper checks around an operation, with drivers and NVMLs that misbehave."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.checkpoint import CheckpointApi, CudaState, uuid_bytes, uuid_text
from liveshift.cuda_snapshot.devices import Inventory, Nvml, NvmlGpu
from liveshift.cuda_snapshot.driver import CudaError, CUresult
from liveshift.cuda_snapshot.helper import operations
from liveshift.cuda_snapshot.helper.operations import Operations
from liveshift.errors import LiveshiftError, StepFailed

MIB = 1 << 20
A, B = uuid_text(b"a" * 16), uuid_text(b"b" * 16)
PID = 2**22 + 1  # above the kernel's largest
HUNG = Inventory(None, (), "NVML did not answer within 20 s")


class Driver:
    """Does what it is told, unless ``fails`` names the function."""

    def __init__(self, state: CudaState = CudaState.RUNNING) -> None:
        self.is_now: CudaState | None = state
        self.fails: dict[str, int] = {}
        self.after: dict[str, CudaState | None] = {}
        self.restored: list[Sequence[tuple[str, str]]] = []

    def state(self, pid: int) -> CudaState:
        if self.is_now is None:
            why = self.fails.get("state", CUresult.INVALID_VALUE)
            raise CudaError("cuCheckpointProcessGetState", why)
        return self.is_now

    def _do(self, name: str, then: CudaState) -> None:
        self.is_now = self.after.get(name, then if name not in self.fails else self.is_now)
        if name in self.fails:
            raise CudaError(name, self.fails[name])

    def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms >= 1, "0 would be no limit"
        self._do("lock", CudaState.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._do("checkpoint", CudaState.CHECKPOINTED)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        self.restored.append(pairs)
        self._do("restore", CudaState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._do("unlock", CudaState.RUNNING)


class Told:
    """An NVML that gives these answers, the last one for ever."""

    def __init__(self, *answers: Inventory) -> None:
        self._answers = list(answers)

    def inventory(self) -> Inventory:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def host(used: Mapping[int, int] | None, free: int = 1000 * MIB) -> Inventory:
    """Two GPUs; the first one has these processes."""
    one = NvmlGpu(0, A, "H200", 1 << 30, free, "0", (9, 0), None, None)
    processes: dict[int, int | None] | None = None if used is None else dict(used)
    gpus = (replace(one, processes=processes), replace(one, uuid=B, processes={}))
    return Inventory("580.159.03", gpus, None)


def made(driver: Driver, *told: Inventory) -> Operations:
    fake: Any = Told(*told)
    return Operations(cast(CheckpointApi, driver), cast(Nvml, fake))


def test_a_driver_that_names_another_error_for_no_cuda_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driver.is_now, driver.fails["state"] = None, CUresult.OPERATING_SYSTEM
    todo = made(driver, host({}))
    assert todo.state(os.getpid()) is None, "it has no device file open"
    assert todo.state(PID) is None, "it has ended"
    monkeypatch.setattr(operations, "_has_device_files", lambda pid: True)
    with pytest.raises(CudaError):  # then it may hold a GPU, and an image would lack that
        todo.state(os.getpid())


def test_memory_that_stays_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SETTLE_S", 0.05)
    todo = made(Driver(CudaState.LOCKED), host({PID: 5 * MIB}))
    with pytest.raises(StepFailed, match=f"still holds 5.24 MB on {A}") as caught:
        todo.checkpoint(PID)
    assert "restore and unlock it" in str(caught.value.hint)


def test_memory_that_goes_soon_is_waited_for() -> None:
    held, gone = host({PID: 5 * MIB}), host({})
    todo = made(Driver(CudaState.LOCKED), held, held, held, gone)
    todo.checkpoint(PID)
    assert todo.nvml.inventory() == gone


@pytest.mark.parametrize(
    ("answers", "remark"),
    [
        ([host({})], "does not report what this process held"),
        ([host(None)], "does not report what this process held"),
        ([HUNG], "did not answer"),
        ([host({PID: MIB}), HUNG], "did not answer"),
    ],
)
def test_what_nvml_can_not_tell_is_logged(
    caplog: pytest.LogCaptureFixture, answers: list[Inventory], remark: str
) -> None:
    made(Driver(CudaState.LOCKED), *answers).checkpoint(PID)
    assert f"checkpoint of {PID}: not verified" in caplog.text
    assert remark in caplog.text


@pytest.mark.parametrize(
    ("state", "words"), [(CudaState.LOCKED, "is LOCKED"), (None, "is unknown")]
)
def test_a_driver_that_says_done_and_is_not(state: CudaState | None, words: str) -> None:
    driver = Driver(CudaState.LOCKED)
    driver.after["checkpoint"] = state
    with pytest.raises(StepFailed, match=f"reported success, but the state {words}"):
        made(driver, host({})).checkpoint(PID)


def test_a_lock_that_the_driver_leaves_behind_is_undone() -> None:
    driver = Driver()
    driver.fails["lock"] = CUresult.NOT_READY
    driver.after["lock"] = CudaState.LOCKED
    with pytest.raises(StepFailed, match="did not end in time; it runs on"):
        made(driver, HUNG).lock(PID, 0)
    assert driver.is_now is CudaState.RUNNING


def test_the_room_of_a_restore() -> None:
    driver = Driver(CudaState.LOCKED)
    todo = made(driver, host({PID: 5 * MIB}), host({}), host({}, free=260 * MIB), host({}))
    todo.checkpoint(PID)
    with pytest.raises(StepFailed, match=f"needs 5.24 MB and 268 MB to spare on {A}"):
        todo.restore(PID, (), None)
    assert driver.restored == []
    assert driver.is_now is CudaState.CHECKPOINTED
    todo.restore(PID, [(A, A), (B, B)], None)
    assert driver.restored == [()], "a map that changes nothing is left out"


def test_where_nvml_hangs_the_driver_is_let_try() -> None:
    driver = Driver(CudaState.CHECKPOINTED)
    made(driver, HUNG).restore(PID, [(A, B), (B, A)], {B: 1 << 40})
    assert driver.restored == [[(A, B), (B, A)]]


@pytest.mark.parametrize(
    ("result", "after", "words"),
    [
        (CUresult.OUT_OF_MEMORY, None, "cannot be restored any more; it is checkpointed"),
        (CUresult.OPERATING_SYSTEM, None, "an earlier restore has failed"),
        (CUresult.NOT_PERMITTED, None, "the helper has no right to it"),
        (CUresult.UNKNOWN, CudaState.FAILED, "UNKNOWN .*: it is lost"),
        (4711, None, r"CUDA_ERROR_\? \(4711\): it is checkpointed"),
    ],
)
def test_a_restore_that_fails_is_explained(
    result: int, after: CudaState | None, words: str
) -> None:
    driver = Driver(CudaState.CHECKPOINTED)
    driver.fails["restore"] = result
    if after is not None:
        driver.after["restore"] = after
    with pytest.raises(StepFailed, match=words):
        made(driver, HUNG).restore(PID, (), None)


def test_uuids_of_gpus() -> None:
    text = "GPU-51c0da00-0000-4000-8000-000000000001"
    assert uuid_text(uuid_bytes(text)) == text
    for wrong in ("MIG-51c0da00-0000-4000-8000-000000000001", "GPU-51", "GPU-", ""):
        with pytest.raises(LiveshiftError, match="is no UUID of a GPU"):
            uuid_bytes(wrong)


def test_the_state_of_a_stopped_process_is_not_asked_of_the_driver() -> None:
    """The driver's answer would come once the process goes on."""
    todo = made(Driver(), host({}))
    with subprocess.Popen(["sleep", "600"]) as process:
        threads.stop(process.pid, 5.0)
        with pytest.raises(StepFailed, match=r"is stopped \(SIGSTOP\)"):
            todo.state(process.pid)
        process.kill()
