# SPDX-License-Identifier: Apache-2.0
"""The simulated NVML: it sees what the simulated CUDA does, and all that we ask NVML."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_process import CudaProcess, doubles
from doubles.gpu import build

from liveshift.cuda_snapshot import checkpoint, devices
from liveshift.cuda_snapshot.checkpoint import survey, uuid_text
from liveshift.launcher.checks import machine
from liveshift.launcher.checks.finding import Verdict

__all__ = ["doubles"]

MIB = 1 << 20
A, B = (uuid_text(os.urandom(16)) for _ in range(2))
"""Known to no other tests on this machine, whose processes hold memory of theirs."""
Start = Callable[..., CudaProcess]


@pytest.fixture
def start(doubles: build.Doubles) -> Iterator[Start]:
    started: list[CudaProcess] = []

    def one(inventory: str, **environment: str) -> CudaProcess:
        process = CudaProcess(doubles, inventory, **environment)
        started.append(process)
        assert process.do("init()") == 0
        return process

    yield one
    for process in started:
        process.end()


def test_the_gpus_are_those_of_cuda(
    doubles: build.Doubles, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"{A}:H200:1GiB:0000:1A:00.0 mig mps,{B}:H100:512MiB nopersistence,driver=570.86.15"
    monkeypatch.setenv("SIMCUDA_DEVICES", host)
    process = start(host)
    assert process.do(f"alloc({3 * MIB})") > 0
    told = devices.inventory(libraries=doubles.folder)
    assert (told.driver, told.why_none) == ("570.86.15", None)
    first, second = told.devices
    assert first == devices.NvmlGpu(
        index=0,
        uuid=A,
        name="liveshift simulated GPU H200",
        memory_bytes=1024 * MIB,
        free_bytes=1021 * MIB,
        pci_bus_id="00000000:1A:00.0",
        compute_capability=(9, 0),
        mig=True,
        persistence=True,
        processes={},
        mps=True,
    )
    assert second.name == "liveshift simulated GPU H100"
    assert (second.uuid, second.mig, second.persistence, second.mps) == (B, False, False, False)
    assert process.do("bus()") == "0000:1A:00.0"
    assert process.do("version()") == 12080


def test_it_tells_what_a_process_holds_until_its_checkpoint(
    doubles: build.Doubles, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"{A}:H200:1GiB,{B}:H200:1GiB"
    monkeypatch.setenv("SIMCUDA_DEVICES", host)
    one, other = start(host), start(host, CUDA_VISIBLE_DEVICES="1")
    assert one.do(f"alloc({4 * MIB})") > 0
    assert other.do(f"alloc({2 * MIB})") > 0
    nvml = devices.Nvml(doubles.folder)
    try:
        told = nvml.inventory()
        assert told.devices[0].processes == {one.pid: 4 * MIB}
        assert told.devices[1].processes == {other.pid: 2 * MIB}
        assert told.used(other.pid) == {B: 2 * MIB}
        assert one.do(f"lock({other.pid})") == 0
        assert one.do(f"checkpoint({other.pid})") == 0
        told = nvml.inventory()
        assert told.used(other.pid) == {}
        assert told.devices[1].free_bytes == 1024 * MIB
    finally:
        nvml.close()


def test_one_that_hangs_is_replaced(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "hangs"
    monkeypatch.setenv("SIMCUDA_NVML_HANGS", str(mark))
    nvml = devices.Nvml(doubles.folder)
    try:
        assert nvml.inventory().devices
        mark.touch()
        assert "did not answer within 0.1 s" in str(nvml.inventory(0.1).why_none)
        mark.unlink()
        assert nvml.inventory().devices
    finally:
        nvml.close()


def test_doctor_says_what_stands_in_the_way_of_a_checkpoint(
    doubles: build.Doubles, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"{A}:H200:1GiB mps,{B}:H200:1GiB mig nopersistence"
    monkeypatch.setenv("SIMCUDA_DEVICES", host)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(doubles.folder))
    monkeypatch.setattr(checkpoint, "survey", lambda *_: survey(str(doubles.libcuda)))
    assert start(host).do(f"alloc({MIB})") > 0
    (finding,) = machine.gpus()
    assert finding.verdict is Verdict.WARN
    assert "2 × liveshift simulated GPU H200" in finding.found
    for word in ("MIG", "MPS", "nvidia-smi -pm 1"):
        assert word in finding.advice
