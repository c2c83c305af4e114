# SPDX-License-Identifier: Apache-2.0
"""Puts files of a carried directory back for a capsule that goes back to a snapshot where it was.

Others use the directory too: other jobs, and other users. So little is changed. A file that the
capsule had open at the snapshot gets the content back that it had. What the capsule's user had
there, and what is gone, is made again. All else stays as it is, also what the capsule has created
since. Everything is done with the rights of the capsule's user.
"""

from __future__ import annotations

import os
import stat
import tarfile
from pathlib import Path

from ...errors import StepFailed
from . import below, sparse
from .rights import User
from .trees import FORCED, GONE, SAME_AGE_NS
from .unpacking import Unpacker, open_there


class PuttingBack(Unpacker):
    """Unpacks a tar stream of trees.py below the directory from which it was made.

    ``opened``: the names of the files that the capsule had open or mapped. They are written in
    place, so all their names stay those of one file.
    """

    def __init__(self, destination: Path, user: User, opened: frozenset[str]) -> None:
        self._opened = opened
        self._inodes: set[tuple[int, int]] | None = None
        super().__init__(destination, user=user, as_user=True)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
        if self._inodes is None:
            self._inodes = self._find_opened(top)
        super()._take(tar, member, top)

    def _find_opened(self, top: int) -> set[tuple[int, int]]:
        """The device and inode of each opened file, as it is here: tar has the content of a file
        under the first of its names, which may be another one."""
        found = set()
        for name in self._opened:
            try:
                with below.parent_of(top, name, one_mount=True) as (parent, last):
                    there = os.lstat(last, dir_fd=parent)
            except (OSError, below.UnfitName):
                continue  # it is gone, or out of reach: then the restore says so
            found.add((there.st_dev, there.st_ino))
        return found

    def _wants(self, member: tarfile.TarInfo, parent: int, last: str) -> bool:
        try:
            there = os.lstat(last, dir_fd=parent)
        except GONE:
            return member.name in self._opened or member.uid == self._user.uid
        assert self._inodes is not None
        was_open = member.name in self._opened or (there.st_dev, there.st_ino) in self._inodes
        if not (was_open and member.isreg()):  # the content of a link has come before
            return False
        if not stat.S_ISREG(there.st_mode) or there.st_uid != member.uid:
            raise StepFailed(
                "files",
                f"{member.name} cannot be put back: the capsule had it open at the snapshot, and"
                " now another file, or another user's, has this name",
                hint="move that file away",
            )
        return _changed(member, there)

    def _open(self, parent: int, last: str) -> int:
        try:
            return open_there(parent, last)
        except FileNotFoundError:
            return super()._open(parent, last)


def _changed(member: tarfile.TarInfo, there: os.stat_result) -> bool:
    """Whether a file here may differ from the entry."""
    size = int(member.pax_headers.get(sparse.HEADER, member.size))
    age_ns = int(member.mtime * 1e9) - there.st_mtime_ns
    same = (size, member.mode & 0o7777) == (there.st_size, stat.S_IMODE(there.st_mode))
    return not same or abs(age_ns) >= SAME_AGE_NS or FORCED in member.pax_headers
