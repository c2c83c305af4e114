# SPDX-License-Identifier: Apache-2.0
"""The files that a tree has open or mapped on shared and on carried paths, as its image has them.

Those on shared paths are not part of an image. A tree that goes back to it writes again what it had
written since, there and on carried paths. A file whose name was gone at the dump is none of them:
what has that name now is another file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import StepFailed
from ..capsule.mounts import Mount, PathKind, Placement
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage

REGULAR = 1  # criu: images/fdinfo.proto (fd_types)
_TYPE, _REG = 1, 3  # of a file_entry
_ID, _FLAGS, _NAME, _SIZE = 1, 2, 6, 8  # criu: images/regfile.proto
_LOST_ID = 1  # criu: images/remap-file-path.proto (orig_id)
_ROOT = Mount("", "/", "/", "", "")
"""An image is looked at without its capsule. But what a capsule has mounted elsewhere than there is
private to it, and Placement knows those paths by name."""


def shared(
    images: Path, placement: Placement, noted: Mapping[bytes, int]
) -> tuple[dict[bytes, int], set[bytes]]:
    """Those on shared paths that are open for writing, path → bytes; and which of them are open
    only for appending. Devices and pipes with a name are among the first.

    CRIU notes no size of a file that is open only for appending, as logs are (source: CRIU's
    files-reg.c, should_check_size). ``noted`` gives the sizes of such files. The result
    lacks a file if neither CRIU nor ``noted`` gives its size. Raises StepFailed if the image is
    damaged."""
    sizes, appended = dict[bytes, int](), set[bytes]()
    for name, entry in _files(images, placement, PathKind.SHARED):
        if not _writes(entry):
            continue
        if _SIZE in entry:
            sizes[name] = entry.long(_SIZE)
            appended.discard(name)  # a file may be open twice
        elif name in noted and name not in sizes:
            sizes[name] = noted[name]
            appended.add(name)
    return sizes, appended


def carried(images: Path, placement: Placement) -> tuple[set[bytes], set[bytes]]:
    """Those on carried paths: all, and those that are open for writing. Raises StepFailed if the
    image is damaged."""
    opened = [*_files(images, placement, PathKind.CARRIED)]
    return {name for name, _ in opened}, {name for name, entry in opened if _writes(entry)}


def _writes(entry: ProtobufMessage) -> bool:
    return entry.uint(_FLAGS) & os.O_ACCMODE != os.O_RDONLY


def _files(
    images: Path, placement: Placement, kind: PathKind
) -> Iterator[tuple[bytes, ProtobufMessage]]:
    try:
        lost = {entry.uint(_LOST_ID) for entry in _entries(images / "remap-fpath.img")}
        for entry in _entries(images / "files.img"):
            regular = entry.message(_REG) if entry.uint(_TYPE) == REGULAR else None
            if regular is None or regular.uint(_ID) in lost:
                continue
            name = bytes(regular.raw(_NAME) or b"")
            if placement.of_open_file(os.fsdecode(name), _ROOT) is kind:
                yield name, regular
    except Damaged as error:
        raise StepFailed("restore", f"the image is damaged: {error}") from error


def _entries(path: Path) -> Iterator[ProtobufMessage]:
    """Those of an image file. CRIU makes such a file with its first entry."""
    if path.exists():
        yield from map(ProtobufMessage, ImageFile(path).entries)
