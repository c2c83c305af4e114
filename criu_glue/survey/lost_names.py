# SPDX-License-Identifier: Apache-2.0
"""Files that a task has open or mapped by a name that is gone, while they have another one.

CRIU restores them by a second name that it gives them (link_remaps.py). In a capsule's own
directories that name goes along, on a shared path it is there already; elsewhere it would stay
behind, and the restore would fail. A deleted file without any name goes in CRIU's image, from
wherever it was (ghosts.py).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ... import units
from ..capsule.mounts import Place, Placement
from ..capsule.tree import descriptors

DELETED = " (deleted)"
"""How the kernel marks such a name (proc(5))."""

MOST_DELETED = 4 << 30
"""Bytes of a file without any name that CRIU takes into its image (``--ghost-limit``)."""

REMEDY = "close it before the move, or have it made below /tmp, /dev/shm or a path of files.shared"


def look(
    pid: int, who: str, placement: Placement, mounts: dict[int, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """(what stands in the way, what to do) for each such file that could not go along."""
    for path, at in _deleted(pid):
        with contextlib.suppress(OSError):  # closed meanwhile
            seen = os.stat(at)
            names = seen.st_nlink
            if not names and seen.st_blocks * 512 > MOST_DELETED:
                yield (
                    f"{who} uses {path}, which was deleted and has"
                    f" {units.size(seen.st_blocks * 512)}, more than can be carried",
                    "keep its name, below /tmp or /dev/shm, until it is closed",
                )
            elif names and placement.of_path(path, mounts) not in (Place.PRIVATE, Place.SHARED):
                yield (
                    f"{who} uses {path}, a name that was deleted, of a file that has another name"
                    " and would stay behind",
                    REMEDY,
                )


def nameless(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of its files without any name, by device and inode: they go in CRIU's image. Not those
    in /dev/shm, which counts as a whole, nor memory that no other process sees as a file."""
    found = {}
    for path, at in _deleted(pid):
        if not path.startswith(("/dev/", "/memfd:", "/SYSV")):
            with contextlib.suppress(OSError):  # closed meanwhile
                seen = os.stat(at)
                if stat.S_ISREG(seen.st_mode) and not seen.st_nlink:
                    found[seen.st_dev, seen.st_ino] = seen.st_blocks * 512
    return found


def _deleted(pid: int) -> Iterator[tuple[str, str]]:
    """The name that is gone, and where in /proc its file can be looked at."""
    for fd, target in descriptors(pid):
        if target.startswith("/") and target.endswith(DELETED):
            yield target.removesuffix(DELETED), f"/proc/{pid}/fd/{fd}"
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if not line.endswith(DELETED):
            continue
        where, *_, path = line.split(maxsplit=5)
        if path.startswith("/") and not path.startswith(("/SYSV", "/memfd:", "/dev/zero")):
            begin, _, end = where.partition("-")
            yield (
                path.removesuffix(DELETED),
                f"/proc/{pid}/map_files/{int(begin, 16):x}-{int(end, 16):x}",
            )
