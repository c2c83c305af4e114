# SPDX-License-Identifier: Apache-2.0
"""Lists the private mappings that CRIU makes for each task before its restore, in CRIU's order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ....errors import StepFailed
from ...images.image_kinds import ImageFile
from ...images.protobuf import Damaged, ProtobufMessage, fields

TOP = 1 << 47
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x02, 0x20, 0x100, 0x40000
_EXECUTABLE = 4

# criu: images/mm.proto, vma.proto and pstree.proto, include/image.h
_EXE, _VMAS, _START, _END, _PROTECTION, _FLAGS, _STATUS = 12, 14, 1, 2, 5, 6, 7
_PID, _PARENT = 1, 2
_REGULAR, _FILE_PRIVATE, _ANON_PRIVATE = 1 << 0, 1 << 6, 1 << 9
_AIO_RING, _SHADOW_STACK, _GUARD, _EXTERNAL = 1 << 13, 1 << 15, 1 << 16, 1 << 27
_RARE = _AIO_RING | _SHADOW_STACK | _EXTERNAL


class PrefillLost(Exception):
    """Memory cannot be put in place in advance. Its text is the reason."""


@dataclass
class Region:
    """A private mapping in CRIU's image. ``ours``: CRIU makes it again, and the prefill can put
    memory of its kind in place. ``source``: its address in the early CRIU, or 0."""

    start: int
    size: int
    ours: bool
    source: int = 0


def mapped(images: Path, pids: Iterable[int]) -> dict[int, list[Region]]:
    """Return the mappings of each process. Raises PrefillLost for an image that it cannot read."""
    tasks = {pid: _task(images / f"mm-{pid}.img") for pid in sorted(pids)}
    parents = _parents(images / "pstree.img")
    found = {}
    for pid, task in tasks.items():
        parent = tasks.get(parents.get(pid, 0))
        taken = _taken_over(task.vmas, parent.vmas) if parent and parent.exe == task.exe else set()
        found[pid] = [region for vma in task.vmas if (region := _region(vma, taken))]
    return found


Vma = dict[int, int]
"""One mapping (criu: vma.proto). The keys are the numbers of its fields."""


@dataclass(frozen=True)
class _Task:
    exe: int
    vmas: list[Vma]


def _task(path: Path) -> _Task:
    try:
        image = ProtobufMessage(ImageFile(path).entries[0])
        vmas = [
            {number: value for number, value in fields(raw) if isinstance(value, int)}
            for raw in image.raws(_VMAS)
        ]
        if any(not vma.keys() >= {_START, _END, _PROTECTION, _FLAGS, _STATUS} for vma in vmas):
            raise Damaged("a mapping lacks a field")
        if any(vma[_STATUS] & _RARE or vma[_FLAGS] & _MAP_HUGETLB for vma in vmas):
            raise PrefillLost(f"{path.name} has mappings of a rare kind")
        return _Task(image.uint(_EXE), vmas)
    except (OSError, Damaged, StepFailed) as error:
        raise PrefillLost(f"{path.name}: {error}") from error


def _parents(path: Path) -> dict[int, int]:
    try:
        tasks = [ProtobufMessage(entry) for entry in ImageFile(path).entries]
        return {task.uint(_PID): task.uint(_PARENT) for task in tasks}
    except (OSError, Damaged, StepFailed) as error:
        raise PrefillLost(f"{path.name}: {error}") from error


def _taken_over(vmas: list[Vma], theirs: list[Vma]) -> set[int]:
    """Return the start addresses of the mappings that a task may share copy on write with its
    parent. CRIU takes these over from the parent and does not map them. So they cannot get memory
    that was put in place for the task itself (prefill_shim.c).

    This repeats CRIU's own walk (criu 4.2: mem.c, prepare_cow_vmas_for). That walk passes over the
    mapping just after one that the parent does not have.
    """
    found: set[int] = set()
    at = other = 0
    while vmas and theirs:
        if _may_share(vmas[at], theirs[other]):
            found.add(vmas[at][_START])
        while vmas[at][_START] <= theirs[other][_START]:
            at += 1
            if at == len(vmas) or vmas[at][_STATUS] & _GUARD:
                return found
        while theirs[other][_START] < vmas[at][_START]:
            other += 1
            if other == len(theirs) or theirs[other][_STATUS] & _GUARD:
                return found
    return found


def _may_share(one: Vma, other: Vma) -> bool:
    same = (one[_START], one[_END]) == (other[_START], other[_END])
    kind = _MAP_GROWSDOWN | _MAP_ANONYMOUS
    return same and _private(one) and _private(other) and not (one[_FLAGS] ^ other[_FLAGS]) & kind


def _private(vma: Vma) -> bool:
    status = vma[_STATUS]
    private = status & _REGULAR and status & (_ANON_PRIVATE | _FILE_PRIVATE)
    return bool(private) and vma[_END] <= TOP


def _region(vma: Vma, taken: set[int]) -> Region | None:
    if vma[_STATUS] & _GUARD or not _private(vma):
        return None
    ours = vma[_FLAGS] == _MAP_PRIVATE | _MAP_ANONYMOUS and not vma[_PROTECTION] & _EXECUTABLE
    start, size = vma[_START], vma[_END] - vma[_START]
    return Region(start, size, ours and start not in taken)
