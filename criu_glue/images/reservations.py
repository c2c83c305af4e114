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


def mark(images: Path) -> None:
    """Mark the large reservations of all processes. May be called again.

    Raises StepFailed if an image is damaged."""
    for path in sorted(images.glob("mm-*.img")):
        file = ImageFile(path)
        try:
            file.change(lambda entry: with_messages(entry, _VMAS, _marked))
        except Damaged as error:
            raise StepFailed("verify", f"{path.name} is damaged: {error}") from error


def _marked(raw: memoryview) -> bytes:
    """A mapping, with MAP_NORESERVE if it is a large reservation."""
    mapping = ProtobufMessage(raw)
    flags = mapping.uint(_FLAGS)
    private = flags & (_PRIVATE | _ANONYMOUS | _NORESERVE) == _PRIVATE | _ANONYMOUS
    if not private or mapping.uint(_PROTECTION):
        return bytes(raw)
    large = mapping.long(_END) - mapping.long(_START) >= LARGE
    return with_uint(raw, _FLAGS, flags | _NORESERVE) if large else bytes(raw)
