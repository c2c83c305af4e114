# SPDX-License-Identifier: Apache-2.0
"""A GPU helper on the simulated driver, and the processes that it works on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_process import CudaProcess
from doubles.gpu import build

from liveshift.cuda_snapshot.checkpoint import uuid_text
from liveshift.cuda_snapshot.helper.calls import HelloHelper, Welcome
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import LiveshiftError, StepFailed

MIB = 1 << 20
A, B, C = (uuid_text(os.urandom(16)) for _ in range(3))
"""Known to no other tests on this machine, whose processes hold memory of theirs."""
TWO = f"{A}:H200:1GiB,{B}:H200:1GiB"

StartHelper = Callable[..., GpuHelper]
StartProcess = Callable[..., CudaProcess]


def pid_of(gpu: GpuHelper) -> int:
    with gpu.connection() as connection:
        welcome = connection.ask(HelloHelper(), Welcome)
    assert isinstance(welcome, Welcome)
    return welcome.pid


def end_helper(gpu: GpuHelper) -> None:
    """The helper ends now, if it holds nothing."""
    with contextlib.suppress(ProcessLookupError):  # another client has ended it just now
        os.kill(pid_of(gpu), signal.SIGTERM)


@pytest.fixture
def helper(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartHelper]:
    """Connects to the helper of this test's folder, which ends with the test. It has the GPUs A and
    B and a client's environment, with what is given added."""
    clients: list[GpuHelper] = []

    def start(idle_s: float = 60, **environment: str) -> GpuHelper:
        for name, value in {"SIMCUDA_DEVICES": TWO, **environment}.items():
            monkeypatch.setenv(name, value)
        clients.append(GpuHelper.start(tmp_path, doubles.folder, idle_s=idle_s))
        return clients[-1]

    yield start
    for client in clients:
        with contextlib.suppress(LiveshiftError):
            end_helper(client)
        client.close()


@pytest.fixture
def process(doubles: build.Doubles) -> Iterator[StartProcess]:
    """Starts processes that use CUDA, and ends them."""
    started: list[CudaProcess] = []

    def one(devices: str = TWO, **environment: str) -> CudaProcess:
        started.append(CudaProcess(doubles, devices, **environment))
        assert started[-1].do("init()") == 0
        return started[-1]

    yield one
    for each in started:
        each.end()


def busy(gpu: GpuHelper, target: CudaProcess) -> bool:
    """Whether an operation is under way: no other gets its turn."""
    try:
        gpu.unlock(target.pid, turn_s=0)
    except StepFailed as error:
        return "is busy with gpu lock" in str(error)
    return False
