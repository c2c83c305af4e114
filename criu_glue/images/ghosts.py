# SPDX-License-Identifier: Apache-2.0
"""Files without any name come back in the capsule's own /tmp, wherever they were.

A process may go on using a file that was removed, or replaced by another one of its name: an
upgrade by pip or apt does so to the libraries of all that runs. Such a file goes in CRIU's image.
At the restore CRIU makes it at its old path, as root, has the tasks open and map it there, and
removes it (criu: files-reg.c, ``open_remap_ghost`` and ``rfi_remap``). That path lies mostly in a
directory that only root may write to, or that is not there any more. So the path is changed in the
image: the file keeps its own name, by which it is recognized in /proc/PID/maps, below /tmp. There
its user may make files, so that image_rights.py needs no exception for it. A file of that name is
not touched: CRIU takes another name then. A file that was below the capsule's own /tmp or /dev/shm
stays there, unless another file system is mounted at that place, as a checkout of the host's is.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ..capsule.room import PRIVATE
from ..files import statx
from .image_kinds import ImageFile
from .image_rights import GHOST, REG
from .protobuf import Message, with_message

PLACE = "/tmp"
LONGEST = 200
"""Bytes of a name: CRIU appends up to 20, and a name may have 255."""

_FILE, _GHOST, _KIND = 1, 2, 3  # criu: images/remap-file-path.proto
_TYPE, _NUMBER, _REG = 1, 2, 3  # criu: images/fdinfo.proto (file_entry)
_PATH = 6  # criu: images/regfile.proto
_MODE = 3  # criu: images/ghost-file.proto


def bring_home(files: Mapping[str, ImageFile], root: Path) -> list[str]:
    """Rewrite the image's list of files; returns the paths that were changed. ``files``: those of
    an image that was not checked yet, by name without the suffix; ``root``: the file system of the
    room that it is to be restored into. May be called again. Raises protobuf.Damaged or OSError.
    """
    if "remap-fpath" not in files:
        return []
    remaps = [Message(entry) for entry in files["remap-fpath"].entries]
    ours = {
        remap.uint(_FILE)
        for remap in remaps
        if remap.uint(_KIND, 0) == GHOST
        and _regular(files.get(f"ghost-file-{remap.uint(_GHOST):x}"))
    }
    changed: list[str] = []
    entries = [bytes(entry) for entry in files["files"].entries]
    for at, raw in enumerate(entries):
        entry = Message(raw)
        if entry.uint(_TYPE) != REG or entry.uint(_NUMBER) not in ours:
            continue
        inner = entry.raw(_REG) or memoryview(b"")
        path = bytes(Message(inner).raw(_PATH) or b"")
        if not _at_home(os.fsdecode(path), root):
            name = os.path.join(os.fsencode(PLACE), os.path.basename(path)[:LONGEST])
            entries[at] = with_message(memoryview(raw), _REG, with_message(inner, _PATH, name))
            changed.append(os.fsdecode(path))
    if changed:
        files["files"].rewrite(entries)
    return changed


def _at_home(path: str, root: Path) -> bool:
    """Whether it lies on the capsule's own /tmp or /dev/shm. A wrong answer does no harm: the image
    is checked afterwards."""
    top = next((private for private in PRIVATE if path.startswith(private)), None)
    if top is None:
        return False
    folder = os.path.dirname(path)
    while folder.startswith(top) and not os.path.lexists(root / folder.lstrip("/")):
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        own, there = (statx.stat(root / each.strip("/")).mount for each in (top, folder))
        return own == there
    return True


def _regular(ghost: ImageFile | None) -> bool:
    if ghost is None or not ghost.entries:
        return False
    return stat.S_ISREG(Message(ghost.entries[0]).uint(_MODE, 0))
