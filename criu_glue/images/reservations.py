# SPDX-License-Identifier: Apache-2.0
"""Lets CRIU restore mappings that only reserve addresses and are larger than the host's memory.

Programs reserve addresses by a mapping without access (PROT_NONE): a database gigabytes to grow
into, a runtime terabytes. The kernel counts no memory for it. Where the fill brings the memory,
CRIU maps every private mapping writable at first (criu: restorer.c, restore_mapping), and then the
kernel counts all of it: it refuses one mapping that is larger than memory and swap (mm/util.c,
__vm_enough_memory). With MAP_NORESERVE it counts nothing. Where the kernel overcommits nothing, it
ignores that flag.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import StepFailed
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage, with_messages, with_uint

LARGE = 1 << 30
"""Bytes. Smaller reservations stay as they are."""

_VMAS, _START, _END, _PROTECTION, _FLAGS = 14, 1, 2, 5, 6  # criu: images/mm.proto, vma.proto
_PRIVATE, _ANONYMOUS, _NORESERVE = 0x02, 0x20, 0x4000  # linux/mman.h


def mark(images: Path) -> int:
    """Mark the large reservations of all processes; return how many were not marked yet.

    May be called again. Raises StepFailed if an image is damaged."""
    count = 0
    for path in sorted(images.glob("mm-*.img")):
        try:
            count += _mark(path)
        except Damaged as error:
            raise StepFailed("verify", f"{path.name} is damaged: {error}") from error
    return count


def _mark(path: Path) -> int:
    file = ImageFile(path)
    found = 0

    def marked(raw: memoryview) -> bytes:
        nonlocal found
        flags = _flags_to_set(raw)
        if not flags:
            return bytes(raw)
        found += 1
        return with_uint(raw, _FLAGS, flags)

    entries = [with_messages(entry, _VMAS, marked) for entry in file.entries]
    if found:
        file.rewrite(entries)
    return found


def _flags_to_set(raw: memoryview) -> int:
    """The new flags of a mapping; 0 if it keeps those that it has."""
    mapping = ProtobufMessage(raw)
    flags = mapping.uint(_FLAGS)
    kind = flags & (_PRIVATE | _ANONYMOUS | _NORESERVE)
    if kind != _PRIVATE | _ANONYMOUS or mapping.uint(_PROTECTION):
        return 0
    large = mapping.long(_END) - mapping.long(_START) >= LARGE
    return flags | _NORESERVE if large else 0
