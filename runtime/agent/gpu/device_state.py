# SPDX-License-Identifier: Apache-2.0
"""The saved device state of a process, how it is compared, and how it is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .... import units
from ....cuda_snapshot.helper.blocks import Block
from ....errors import StepFailed
from .survey import NO_ARENA


class DeviceLost(StepFailed):
    """The driver can neither go on with a process's device state nor give it back."""


class SavedDevices(msgspec.Struct, frozen=True):
    """The device state of one process at the boundary.

    ``pid`` is the one that the capsule sees. ``blocks``: memory that the helper holds. ``used``:
    bytes of device memory by GPU. ``sums``: checksum by address, each over ``samples`` blocks of
    4 KiB (0: over all bytes, None: no checksums). ``stopped``: whether the process was stopped for
    the move, by SIGSTOP; ``parents``: its ancestors in the capsule that ran then (pids inside), and
    may have stopped themselves since.
    """

    pid: int
    blocks: list[Block] = []
    used: dict[str, int] = {}
    sums: dict[int, int] = {}
    samples: int | None = None
    stopped: bool = False
    parents: list[int] = []

    @property
    def bytes(self) -> int:
        """Bytes of ``blocks``, which go from GPU to GPU."""
        return sum(block.size for block in self.blocks)


def left_to_driver(saved: SavedDevices, gpus: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Bytes by new GPU that the driver's restore will request. Memory that the helper holds does
    not count: it is on the new GPU already."""
    left = dict(saved.used)
    for block in saved.blocks:
        left[block.gpu] = max(0, left.get(block.gpu, 0) - block.size)
    to = dict(gpus)
    return {to.get(gpu, gpu): size for gpu, size in left.items()}


def compare(saved: SavedDevices, now: Mapping[int, int]) -> None:
    """Raises DeviceLost if device memory differs from that at the boundary."""
    wrong = [address for address, value in saved.sums.items() if now.get(address) != value]
    if wrong:
        first = ", ".join(f"{address:#x}" for address in sorted(wrong)[:3])
        raise DeviceLost(
            "gpu verify",
            f"process {saved.pid}: {len(wrong)} of {len(saved.sums)} device allocations are not"
            f" what they were at the boundary (at {first})",
        )


def words_of_save(saved: Sequence[SavedDevices], plain: str = "") -> str:
    """A text such as "2 CUDA processes, 3 allocations from GPU to GPU, 12.6 MB by the driver, 40
    checksums".

    ``plain``: why no process took the fast path.
    """
    if not saved:
        return "no CUDA process"
    parts = [f"{len(saved)} CUDA process{'es' if len(saved) > 1 else ''}"]
    blocks = sum(len(s.blocks) for s in saved)
    used = sum(sum(s.used.values()) for s in saved)
    handed = sum(s.bytes for s in saved)
    if blocks:
        left = units.size(max(0, used - handed))
        several = "s" if blocks > 1 else ""
        parts.append(f"{blocks} allocation{several} from GPU to GPU, {left} by the driver")
    else:
        parts.append(f"all by the driver's own checkpoint ({plain or NO_ARENA})")
    sums = sum(len(s.sums) for s in saved)
    parts.append(f"{sums} checksums" if sums else "no checksums")
    return ", ".join(parts)


def words_of_return(saved: Sequence[SavedDevices]) -> str:
    """A text such as "2 CUDA processes, 40 checksums alike"."""
    sums = sum(len(s.sums) for s in saved)
    parts = [f"{len(saved)} CUDA process{'' if len(saved) == 1 else 'es'}"]
    return ", ".join(parts + ([f"{sums} checksums alike"] if sums else []))
