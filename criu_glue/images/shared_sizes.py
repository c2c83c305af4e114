# SPDX-License-Identifier: Apache-2.0
"""Removes the sizes of files from an image: of those on shared paths, and of others that are named.

At a restore, CRIU compares the size of every file that it opens with the size at the dump. On a
shared path both hosts have the same file, and another program may have written to it in between.
Without a size in the image CRIU compares neither size nor build id (criu: files-reg.c, open_path
and validate_file). Files elsewhere keep their sizes, because they have been copied, or compared
before.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

from ...errors import StepFailed
from ..capsule.mounts import PathKind, Placement, mount_table
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage, with_message, without

REGULAR = 1  # criu: images/fdinfo.proto (fd_types)
_TYPE, _REG = 1, 3  # of a file_entry
_NAME, _SIZE = 6, 8  # criu: images/regfile.proto


def forget(images: Path, placement: Placement, init: int, also: Set[bytes] = frozenset()) -> None:
    """Rewrite the image's list of files. ``init`` is process 1 of the sandbox. ``also``: further
    files whose sizes may have changed.

    May be called again. Raises StepFailed."""
    mounts = mount_table(init)

    def without_size(raw: memoryview) -> bytes:
        entry = ProtobufMessage(raw)
        regular = entry.raw(_REG) if entry.uint(_TYPE) == REGULAR else None
        if regular is None:
            return bytes(raw)
        raw_name = bytes(ProtobufMessage(regular).raw(_NAME) or b"")
        shared = placement.of_path(os.fsdecode(raw_name), mounts) is PathKind.SHARED
        if not shared and raw_name not in also:
            return bytes(raw)
        return with_message(raw, _REG, without(regular, _SIZE))

    try:
        ImageFile(images / "files.img").change(without_size)
    except Damaged as error:
        raise StepFailed("verify", f"the image is damaged: {error}") from error
