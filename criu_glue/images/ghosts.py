# SPDX-License-Identifier: Apache-2.0
"""Restores files without any name in the capsule's own /tmp, instead of at their old paths.

A process may go on using a file that was removed, or replaced by another file of the same name. An
upgrade by pip or apt does that to the libraries of running programs. CRIU puts such a file into its
image. At the restore CRIU, as root, makes the file at its old path, lets the tasks open and map it
there, and removes it (criu: files-reg.c, ``open_remap_ghost`` and ``rfi_remap``). That path mostly
lies in a directory that only root may write to, or that no longer exists.

So we change the path in the image to one below /tmp. The file keeps its own name, by which a person
recognizes it in /proc/PID/maps. The capsule's user may make files there, so image_rights.py needs
no exception. If /tmp has a file of that name, CRIU takes another name. A file that was below the
capsule's own /tmp or /dev/shm stays there, unless another file system is mounted at that place,
such as a checkout of the host.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ..capsule.sandboxes import PRIVATE
from ..files import statx
from .image_kinds import ImageFile
from .image_rights import GHOST, REG
from .protobuf import ProtobufMessage, with_message

PLACE = "/tmp"
LONGEST = 200
"""A name is cut to this many bytes: CRIU appends up to 20, and the kernel allows 255."""

_FILE, _GHOST, _KIND = 1, 2, 3  # criu: images/remap-file-path.proto
_TYPE, _NUMBER, _REG = 1, 2, 3  # criu: images/fdinfo.proto (file_entry)
_PATH = 6  # criu: images/regfile.proto
_MODE = 3  # criu: images/ghost-file.proto


def bring_home(files: Mapping[str, ImageFile], root: Path) -> None:
    """Rewrite the paths in the image's list of files.

    ``files`` are the files of an unchecked image, by name without the suffix. ``root`` is the file
    system of the sandbox into which CRIU will restore. May be called again. Raises protobuf.Damaged
    or OSError.
    """
    if "remap-fpath" not in files:
        return
    remaps = [ProtobufMessage(entry) for entry in files["remap-fpath"].entries]
    ours = {
        remap.uint(_FILE)
        for remap in remaps
        if remap.uint(_KIND, 0) == GHOST
        and _regular(files.get(f"ghost-file-{remap.uint(_GHOST):x}"))
    }

    def brought_home(raw: memoryview) -> bytes:
        entry = ProtobufMessage(raw)
        if entry.uint(_TYPE) != REG or entry.uint(_NUMBER) not in ours:
            return bytes(raw)
        inner = entry.raw(_REG) or memoryview(b"")
        path = bytes(ProtobufMessage(inner).raw(_PATH) or b"")
        if _at_home(os.fsdecode(path), root):
            return bytes(raw)
        name = os.path.join(os.fsencode(PLACE), os.path.basename(path)[:LONGEST])
        return with_message(raw, _REG, with_message(inner, _PATH, name))

    files["files"].change(brought_home)


def _at_home(path: str, root: Path) -> bool:
    """True if the path lies on the capsule's own /tmp or /dev/shm. A wrong answer does no harm,
    because the image is checked afterwards."""
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
    return stat.S_ISREG(ProtobufMessage(ghost.entries[0]).uint(_MODE, 0))
