# SPDX-License-Identifier: Apache-2.0
"""Removes the sizes of files on shared paths from an image.

At a restore, CRIU compares the size of every file that it opens with the size at the dump. On a
shared path both hosts have the same file, and another program may have written to it in between.
Without a size in the image CRIU compares neither size nor build id (criu: files-reg.c, open_path
and validate_file). Files elsewhere keep their sizes, because they have been copied, or compared
before.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import StepFailed
from ..capsule.mounts import Mounts, PathKind, Placement, mount_table
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage, with_message, without

REGULAR = 1  # criu: images/fdinfo.proto (fd_types)
_TYPE, _REG = 1, 3  # of a file_entry
_NAME, _SIZE = 6, 8  # criu: images/regfile.proto


def forget(images: Path, placement: Placement, init: int) -> list[str]:
    """Rewrite the image's list of files; returns the paths whose sizes were removed.

    ``init`` is process 1 of the sandbox. May be called again. Raises StepFailed."""
    try:
        return _forget(images / "files.img", placement, mount_table(init))
    except Damaged as error:
        raise StepFailed("verify", f"the image is damaged: {error}") from error


def _forget(path: Path, placement: Placement, mounts: Mounts) -> list[str]:
    forgotten: list[str] = []
    file = ImageFile(path)
    entries = [bytes(entry) for entry in file.entries]
    for at, raw in enumerate(entries):
        entry = ProtobufMessage(raw)
        if entry.uint(_TYPE) != REGULAR or (regular := entry.message(_REG)) is None:
            continue
        name = os.fsdecode(bytes(regular.raw(_NAME) or b""))
        if _SIZE in regular and placement.of_path(name, mounts) is PathKind.SHARED:
            inner = without(entry.raw(_REG) or memoryview(b""), _SIZE)
            entries[at] = with_message(memoryview(raw), _REG, inner)
            forgotten.append(name)
    if forgotten:
        file.rewrite(entries)
    return forgotten
