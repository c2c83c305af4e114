# SPDX-License-Identifier: Apache-2.0
"""The resident GPU helper and its client, on the simulated driver."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_process import CudaProcess, doubles
from doubles.gpu import build

from liveshift.cuda_snapshot.checkpoint import ProcessState
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import LiveshiftError

__all__ = ["doubles"]

MIB = 1 << 20
A, B = "GPU-" + "a" * 32, "GPU-" + "b" * 32
Start = Callable[..., CudaProcess]


def uuid(text: str) -> str:
    digits = text.removeprefix("GPU-")
    lengths, parts = (8, 4, 4, 4, 12), []
    for length in lengths:
        parts.append(digits[:length])
        digits = digits[length:]
    return "GPU-" + "-".join(parts)


UA, UB = uuid(A), uuid(B)
TWO = f"{A}:H200:1GiB,{B}:H200:1GiB"


@pytest.fixture
def helper(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GpuHelper]]:
    """Connects to the helper of this test's folder; ends it."""
    clients: list[GpuHelper] = []

    def start(**environment: str) -> GpuHelper:
        for name, value in {"SIMCUDA_DEVICES": TWO, **environment}.items():
            monkeypatch.setenv(name, value)
        clients.append(GpuHelper.start(tmp_path, doubles.folder))
        return clients[-1]

    yield start
    for client in clients:
        with contextlib.suppress(LiveshiftError):
            client.leave()
        client.close()


@pytest.fixture
def start(doubles: build.Doubles) -> Iterator[Start]:
    """Starts processes that use CUDA, and ends them."""
    started: list[CudaProcess] = []

    def one(devices: str = TWO, **environment: str) -> CudaProcess:
        process = CudaProcess(doubles, devices, **environment)
        started.append(process)
        assert process.do("init()") == 0
        return process

    yield one
    for process in started:
        process.end()


def test_a_process_goes_through_all_states(helper: Callable[..., GpuHelper], start: Start) -> None:
    gpu, target = helper(), start()
    address = target.do(f"alloc({3 * MIB})")
    target.do(f"put({address}, b'content')")
    assert gpu.state(target.pid) is ProcessState.RUNNING
    assert Path(f"/proc/{target.pid}/task/{gpu.restore_thread(target.pid)}").exists()
    gpu.lock(target.pid, 5)
    assert gpu.state(target.pid) is ProcessState.LOCKED
    gpu.checkpoint(target.pid)
    assert gpu.state(target.pid) is ProcessState.CHECKPOINTED
    gpu.restore(target.pid, [(UA, UB), (UB, UA)])
    assert gpu.state(target.pid) is ProcessState.LOCKED
    gpu.unlock(target.pid)
    assert gpu.state(target.pid) is ProcessState.RUNNING
    assert target.do(f"get({address}, 7)") == b"content"
    assert target.do("uuids()") == ["b" * 32, "a" * 32]
    assert gpu.state(os.getpid()) is None
