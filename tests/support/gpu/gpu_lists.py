# SPDX-License-Identifier: Apache-2.0
"""GPUs of hosts as NVML would list them, and what capsules use of them."""

from __future__ import annotations

from liveshift.cuda_snapshot.devices import NvmlGpu
from liveshift.runtime.messages import GpuHost, GpuProcess, GpuSurvey

GIB = 1 << 30
H200, A100 = "NVIDIA H200", "NVIDIA A100"


def gpu(index: int, host: str = "a", name: str = H200, free: int = 140 * GIB) -> NvmlGpu:
    return NvmlGpu(
        index,
        f"GPU-{host}{index:07d}-0000",
        name,
        140 * GIB,
        free,
        f"0000:0{index}:00.0",
        (9, 0) if name == H200 else (8, 0),
        False,
        True,
        {},
        False,
    )


def host(letter: str, count: int, name: str = H200) -> list[NvmlGpu]:
    return [gpu(n, letter, name) for n in range(count)]


GPUS = [gpu(n) for n in range(4)]
UUIDS = [g.uuid for g in GPUS]


def process(pid: int, **used: int) -> GpuProcess:
    """``g1=80``: 80 GiB of GPU 1."""
    held = {UUIDS[int(name[1:])]: size * GIB for name, size in used.items()}
    return GpuProcess(pid, None, "python3", held, 0, "")


def survey(
    *processes: GpuProcess,
    gpus: list[NvmlGpu] = GPUS,
    can_remap: bool = True,
    problems: list[tuple[str, str]] | None = None,
    taken: dict[str, str] | None = None,
) -> GpuSurvey:
    host = GpuHost("580.159", (13, 0), can_remap, False, "", gpus, taken or {})
    return GpuSurvey(host, list(processes), problems or [], [], 1000 * GIB)


ONE = process(1001, g1=80)
