# SPDX-License-Identifier: Apache-2.0
"""Messages about GPUs: those of a host, of a capsule, and of its destination. Sizes in bytes."""

from __future__ import annotations

import msgspec

from ...cuda_snapshot.devices import NvmlGpu


class GpuSeat(msgspec.Struct, frozen=True):
    """One GPU of a host in its heartbeat. ``free``: no process uses it, and no capsule is on its
    way."""

    uuid: str
    name: str
    free: bool


LAUNCHER_S = 30.0
"""Once a rank has failed, its launcher may wait so many seconds for the others before it ends
(torchrun, see agent/host/rank_deaths.py)."""


class DeviceError(msgspec.Struct, frozen=True):
    """An error that the driver has reported of the GPU with the UUID ``gpu``, in words, ``ago``
    seconds before."""

    gpu: str
    text: str
    ago: float


class GpuHost(msgspec.Struct, frozen=True):
    """What a host's GPU helper reports of its driver and all its GPUs, in NVML's order.

    ``fast_path``: why device memory cannot be streamed here, in words, else empty. ``taken``: GPU
    UUID → which other processes use it, in words. ``why_none``: why ``gpus`` is empty, if it is:
    NVML may hang because a GPU has fallen off the bus.
    """

    driver: str
    cuda: tuple[int, int]
    can_remap: bool
    mps: bool
    fast_path: str
    gpus: list[NvmlGpu]
    taken: dict[str, str] = msgspec.field(default_factory=dict)
    why_none: str = ""


class GpuProcess(msgspec.Struct, frozen=True):
    """One CUDA process, by its pid inside the capsule.

    ``used``: GPU UUID → all device memory that it takes. ``movable``: the part of it that the fast
    path takes out of the process (allocations of the interposer's arena). ``plain``: why the fast
    path takes nothing, in words, else empty.
    """

    pid: int
    rank: int | None
    name: str
    used: dict[str, int]
    movable: int
    plain: str


class GpuSurvey(msgspec.Struct, frozen=True):
    """The GPU side of a capsule, as its source sees it; it is sent on to the destination.

    ``problems``: (obstacle, remedy). ``remarks``: facts that are worth knowing, as rows of a plan.
    ``memory``: free host memory of the source.
    """

    host: GpuHost
    processes: list[GpuProcess]
    problems: list[tuple[str, str]]
    remarks: list[tuple[str, str]]
    memory: int

    @property
    def used(self) -> dict[str, int]:
        """GPU UUID → the device memory that all processes of the capsule take."""
        sums: dict[str, int] = {}
        for process in self.processes:
            for uuid, size in process.used.items():
                sums[uuid] = sums.get(uuid, 0) + size
        return sums

    @property
    def total(self) -> int:
        """All device memory in bytes."""
        return sum(self.used.values())

    def by_driver(self, plain: str) -> int:
        """Bytes that the driver's checkpoint copies into the processes' host memory. ``plain``: why
        the destination cannot take streams, in words, else empty."""
        streamed = 0 if plain else sum(p.movable for p in self.processes if not p.plain)
        return max(0, self.total - streamed)
