# SPDX-License-Identifier: Apache-2.0
"""What messages say about GPUs: a host's, a capsule's, and those it gets where it goes. Bytes."""

from __future__ import annotations

import msgspec

from ...cuda_snapshot.devices import Gpu


class GpuSeat(msgspec.Struct, frozen=True):
    """One GPU of a host in its beat; ``free``: no process computes on it and none is to come."""

    uuid: str
    name: str
    free: bool


class GpuHost(msgspec.Struct, frozen=True):
    """What the helper of a host says of its driver and GPUs, all of them, in NVML's order.

    ``fast_path``: empty, or why device memory can't be streamed here, in words.
    ``taken``: GPU uuid → what of others is on it, in words. ``why_none``: why ``gpus`` is empty,
    where it is: NVML may hang, since a GPU has fallen off the bus.
    """

    driver: str
    cuda: tuple[int, int]
    can_remap: bool
    mps: bool
    fast_path: str
    gpus: list[Gpu]
    taken: dict[str, str] = msgspec.field(default_factory=dict)
    why_none: str = ""


class GpuProcess(msgspec.Struct, frozen=True):
    """One CUDA process, by its pid inside the capsule.

    ``used``: by GPU uuid, all it takes of the device's memory; ``movable``: what of it the fast
    path takes out of the process (allocations of the interposer's arena); ``plain``: why nothing
    is taken so, in words, else empty.
    """

    pid: int
    rank: int | None
    name: str
    used: dict[str, int]
    movable: int
    plain: str


class GpuSurvey(msgspec.Struct, frozen=True):
    """The GPU side of a capsule, as seen at its source; sent on to the destination.

    ``problems``: (what stands in the way, what to do); ``remarks``: what is only worth knowing,
    as rows of a plan; ``memory``: what the source's host memory has left.
    """

    host: GpuHost
    processes: list[GpuProcess]
    problems: list[tuple[str, str]]
    remarks: list[tuple[str, str]]
    memory: int

    @property
    def used(self) -> dict[str, int]:
        """By GPU uuid, what all of its processes take."""
        sums: dict[str, int] = {}
        for process in self.processes:
            for uuid, size in process.used.items():
                sums[uuid] = sums.get(uuid, 0) + size
        return sums

    @property
    def total(self) -> int:
        """Bytes of device memory in all."""
        return sum(self.used.values())

    def by_driver(self, plain: str) -> int:
        """Bytes that the driver's checkpoint copies into the processes' host memory; ``plain``:
        why the destination can't take streams, in words, else empty."""
        streamed = 0 if plain else sum(p.movable for p in self.processes if not p.plain)
        return max(0, self.total - streamed)
