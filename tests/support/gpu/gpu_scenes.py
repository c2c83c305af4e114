# SPDX-License-Identifier: Apache-2.0
"""Hosts with GPUs, and capsules with CUDA processes, as tests of what is known before a move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from liveshift.criu_glue.survey.found import GpuTask, Survey
from liveshift.cuda_snapshot.checkpoint import CudaState as Cuda
from liveshift.cuda_snapshot.devices import NvmlGpu
from liveshift.interposer.inspection import (
    KINDS,
    AllocationsHeld,
    DeviceUse,
    ProcessObstacle,
    ProcessState,
)
from liveshift.interposer.layout import MemoryKind
from liveshift.runtime.messages import GpuHost, GpuProcess, GpuSurvey

MIB, GIB = 1 << 20, 1 << 30
H200 = "NVIDIA H200"


def gpu(host: str = "a", index: int = 0, **fields: Any) -> NvmlGpu:
    given: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{host}{index:07d}-0000",
        "name": H200,
        "memory_bytes": 140 * GIB,
        "free_bytes": 139 * GIB,
        "pci_bus_id": f"0000:0{index}:00.0",
        "compute_capability": (9, 0),
        "mig": False,
        "persistence": True,
        "processes": {},
        "mps": False,
    } | fields
    return NvmlGpu(**given)


def gpu_host(letter: str = "a", count: int = 1, **fields: Any) -> GpuHost:
    gpus = [gpu(letter, index) for index in range(count)]
    given = GpuHost("580.159", (13, 0), True, False, "", gpus)
    return msgspec.structs.replace(given, **fields)


def process(
    used: Mapping[str, int], movable: int = 0, plain: str = "", pid: int = 1002
) -> GpuProcess:
    return GpuProcess(1002, 0, "python", dict(used), movable, plain)


def gpu_survey(*processes: GpuProcess, **fields: Any) -> GpuSurvey:
    given = GpuSurvey(gpu_host(), list(processes), [], [], 1 << 40)
    return msgspec.structs.replace(given, **fields)


def task(pid: int = 1002, **fields: Any) -> GpuTask:
    given: dict[str, Any] = {
        "host_pid": 40_000 + pid,
        "name": "python",
        "device_files": True,
        "libcuda": True,
    }
    return GpuTask(pid, **(given | fields))


def survey(*tasks: GpuTask) -> Survey:
    return Survey((1001, 1002), 100 * MIB, 10 * MIB, (), (), (), (), (), tasks)


def page(
    pid: int = 1002, arena: int = 0, other: int = 0, *obstacles: ProcessObstacle
) -> ProcessState:
    memory = [AllocationsHeld(0, KINDS[MemoryKind.ARENA], 1, arena)] if arena else []
    memory += [AllocationsHeld(0, "device", 1, other)] if other else []
    return ProcessState(
        pid=pid,
        rank=3,
        local_rank=0,
        command="python",
        version="0.1.0",
        driver=13000,
        begun={},
        finished=0,
        memory=memory,
        devices=[DeviceUse(0, arena + other, 0, 0, 0)],
        communicators=[],
        events=0,
        graphs=0,
        graph_execs=0,
        graphs_with_nccl=0,
        made=1,
        freed=0,
        missed=0,
        obstacles=list(obstacles),
    )


class Driver:
    """Stands for the GPU helper: by the host's pid, a process's state and what it uses."""

    def __init__(self, states: Mapping[int, Cuda], used: Mapping[int, dict[str, int]]) -> None:
        self._states, self._used = states, used

    def state(self, pid: int) -> Cuda | None:
        return self._states.get(pid)

    def used(self, pid: int) -> dict[str, int]:
        return self._used.get(pid, {})
