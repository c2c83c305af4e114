# SPDX-License-Identifier: Apache-2.0
"""Finds files that a task has open or mapped by a name that is gone.

If the file still has another name, CRIU gives it a new name and restores it from that one
(link_remaps.py). In a capsule's own directories the new name moves with the capsule. On a shared
path the destination has it already. Elsewhere it would stay behind, and the restore would fail. A
deleted file without any name travels in CRIU's image, wherever it was (ghosts.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from ... import proc_text, units
from ..capsule.mounts import Mounts, PathKind, Placement
from ..capsule.tree import descriptors

DELETED = " (deleted)"
"""The suffix by which the kernel marks a name that is gone (proc(5))."""

MOST_DELETED = 4 << 30
"""CRIU takes a file without any name into its image up to this many bytes (``--ghost-limit``)."""

REMEDY = "close it before the move, or have it made below /tmp, /dev/shm or a path of files.shared"


def look(pid: int, who: str, placement: Placement, mounts: Mounts) -> Iterator[tuple[str, str]]:
    """(what prevents a move, what to do) for each such file that could not move."""
    for path, at in _deleted(pid):
        with contextlib.suppress(OSError):  # the task has closed it meanwhile
            seen = os.stat(at)
            names = seen.st_nlink
            if not names and seen.st_blocks * 512 > MOST_DELETED:
                yield (
                    f"{who} uses {path}, which was deleted and has"
                    f" {units.size(seen.st_blocks * 512)}, more than can be carried",
                    "keep its name, below /tmp or /dev/shm, until it is closed",
                )
            elif names and placement.of_path(path, mounts) not in (
                PathKind.PRIVATE,
                PathKind.SHARED,
            ):
                yield (
                    f"{who} uses the deleted name {path} of a file that still has another name"
                    " and would stay behind",
                    REMEDY,
                )


def nameless(pid: int) -> dict[tuple[int, int], int]:
    """(device, inode) → bytes of a process's files without any name, which go into CRIU's image.

    Files in /dev/shm are left out, because /dev/shm counts as a whole. Memory that the kernel only
    shows as a file (memfd, System V) is left out too."""
    found = {}
    for path, at in _deleted(pid):
        if not path.startswith(("/dev/", "/memfd:", "/SYSV")):
            with contextlib.suppress(OSError):  # the process has closed it meanwhile
                seen = os.stat(at)
                if stat.S_ISREG(seen.st_mode) and not seen.st_nlink:
                    found[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
    return found


def _deleted(pid: int) -> Iterator[tuple[str, str]]:
    """(the name that is gone, a path in /proc that leads to its file)."""
    for fd, target in descriptors(pid):
        if target.startswith("/") and target.endswith(DELETED):
            yield target.removesuffix(DELETED), f"/proc/{pid}/fd/{fd}"
    for line in proc_text.lines(f"/proc/{pid}/maps"):
        if not line.endswith(DELETED):
            continue
        where, *_, path = line.split(maxsplit=5)
        if path.startswith("/") and not path.startswith(("/SYSV", "/memfd:", "/dev/zero")):
            begin, _, end = where.partition("-")
            yield (
                path.removesuffix(DELETED),
                f"/proc/{pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}",
            )
