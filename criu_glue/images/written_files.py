# SPDX-License-Identifier: Apache-2.0
"""The files on shared paths that a tree has open for writing, with their sizes at the dump.

They are not part of an image. A tree that goes back to it writes again what it had written since.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import StepFailed
from ..capsule.mounts import Mount, PathKind, Placement
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage

REGULAR = 1  # criu: images/fdinfo.proto (fd_types)
_TYPE, _REG = 1, 3  # of a file_entry
_FLAGS, _NAME, _SIZE = 2, 6, 8  # criu: images/regfile.proto
_ROOT = Mount("", "/", "/", "", "")
"""An image is looked at without its capsule. But what a capsule has mounted elsewhere than there is
private to it, and Placement knows those paths by name."""


def shared(images: Path, placement: Placement) -> dict[bytes, int]:
    """Path → bytes. Devices and pipes with a name are among them. An entry without a size is left
    out: it may be any size. Raises StepFailed if the image is damaged."""
    found: dict[bytes, int] = {}
    path = images / "files.img"
    if not path.exists():
        return found  # CRIU makes it with its first entry
    try:
        for raw in ImageFile(path).entries:
            entry = ProtobufMessage(raw)
            regular = entry.message(_REG) if entry.uint(_TYPE) == REGULAR else None
            if regular is None or regular.uint(_FLAGS) & os.O_ACCMODE == os.O_RDONLY:
                continue
            if _SIZE not in regular:
                continue
            name = bytes(regular.raw(_NAME) or b"")
            if placement.of_open_file(os.fsdecode(name), _ROOT) is PathKind.SHARED:
                found[name] = regular.long(_SIZE)
    except Damaged as error:
        raise StepFailed("restore", f"the image is damaged: {error}") from error
    return found
