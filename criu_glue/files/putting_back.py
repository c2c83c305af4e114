# SPDX-License-Identifier: Apache-2.0
"""Unpacks a carried directory for a capsule that goes back to a snapshot.

Others use the directory too: other jobs, and other users. On a host where the capsule has run since
(PuttingBack), nothing changes but the files that it had open at the snapshot, and everything is
done with the rights of its user. A file that it could write gets the content back that it had. What
it could only read is made again if it is gone, because CRIU needs it. To another host
(BringingAlong) all files come, as in a move.
"""

from __future__ import annotations

import logging
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path, PurePath

from ...errors import StepFailed
from . import attributes, below, sparse
from .below import GONE
from .rights import User
from .sparing import Sparing
from .trees import FORCED, SAME_AGE_NS
from .unpacking import NotAllowed, Unpacker

log = logging.getLogger("liveshift.files")

_THERE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PuttingBack(Unpacker):
    """Unpacks a tar stream of trees.py below the directory from which it was made.

    ``opened``: the names of the files and directories that the capsule had open or mapped.
    ``written``: those of them that it could write, but for files that it had only mapped: these
    have the header FORCED.
    """

    def __init__(self, destination: Path, user: User, opened: Set[str], written: Set[str]) -> None:
        self._opened = opened
        self._parents = {str(parent) for name in opened for parent in PurePath(name).parents}
        self._could_write = written
        super().__init__(destination, user=user, as_user=True)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
        name = below.plain(member.name)
        if not (name in self._opened or (member.isdir() and name in self._parents)):
            return
        try:
            with below.parent_of(top, name, make=True, one_mount=True) as (parent, last):
                if self._wants(member, parent, last):
                    self._check(member)
                    if self._put(tar, member, top, parent, last):
                        self.written.append(name)
        except PermissionError as error:
            raise self._not_theirs(name, error) from error
        except OSError as error:
            raise _cannot(name, error.strerror or str(error)) from error
        self.names.append(name)
        if member.isreg():
            self._files.add(name)

    def _wants(self, member: tarfile.TarInfo, parent: int, last: str) -> bool:
        try:
            there = os.lstat(last, dir_fd=parent)
        except GONE:
            return True
        could_write = member.name in self._could_write or FORCED in member.pax_headers
        if not could_write or _unchanged(member, there):
            return False
        if member.islnk():
            raise _cannot(member.name, "it had other names too")
        if not member.isreg():
            return False
        if not stat.S_ISREG(there.st_mode) or there.st_uid != member.uid:
            raise _cannot(
                member.name,
                "something else, or another user's file, has this name now",
                "move it away",
            )
        return True

    def _open(self, name: str, parent: int, last: str) -> int:
        """In place, so that others who read the file see it go on."""
        try:
            fd = os.open(last, _THERE, dir_fd=parent)
        except OSError:  # it is gone, it is read-only by now, or it is a program that runs
            return super()._open(name, parent, last)
        if os.fstat(fd).st_nlink == 1:
            return fd
        os.close(fd)  # the other name may be another file of the snapshot's
        return super()._open(name, parent, last)


def _cannot(name: str, why: str, remedy: str = "") -> StepFailed:
    text = f"{name}, which the capsule had open at the snapshot, cannot be put back: {why}"
    return StepFailed("files", text, hint=remedy)


class BringingAlong(Unpacker):
    """Unpacks a tar stream of trees.py where other files may have the same names: a newer file
    stays, as in a move. What the user may not bring is left out, since the job has no other way to
    go on.

    ``written``: the names of the files that the capsule could write. ``expected``: after
    :meth:`finish`, how those that have come must be here (:func:`check`).
    """

    def __init__(
        self, destination: Path, sparing: Sparing, user: User, written: Set[str], *, running: bool
    ) -> None:
        self._could_write = written
        self.expected: dict[str, tarfile.TarInfo] = {}
        super().__init__(destination, sparing, user, running=running)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
        try:
            super()._take(tar, member, top)
        except NotAllowed as refusal:
            log.info("left out: %s", refusal)
            self.names.append(member.name)
        could_write = member.name in self._could_write or FORCED in member.pax_headers
        if could_write and member.isreg():
            self.expected[member.name] = member


def check(top: Path, expected: Mapping[str, tarfile.TarInfo]) -> None:
    """Raise StepFailed if one of these files differs here: then it is another job's, and the
    capsule must not go on with it."""
    for name, member in expected.items():
        try:
            right = _unchanged(member, os.lstat(top / name), forced=False)
        except GONE:
            continue  # the restore says so
        if not right:
            raise StepFailed(
                "files",
                f"{top / name}, which the capsule had open at the snapshot, is newer on this host",
                hint="move it away, if it is not needed here",
            )


def touch(top: Path, names: Iterable[str]) -> None:
    """Give these files the present time, because the capsule goes on with them: another capsule
    may come here with an earlier copy, newer than the snapshot, which must not replace them."""
    with below.opened(top) as directory:
        for name in names:
            with (
                suppress(OSError, below.UnfitName),
                below.parent_of(directory, name, one_mount=True) as (parent, last),
            ):
                os.utime(last, dir_fd=parent, follow_symlinks=False)


def _unchanged(member: tarfile.TarInfo, there: os.stat_result, *, forced: bool = True) -> bool:
    """Whether a file here has the entry's size, mode and time. ``forced``: and was not written
    through a mapping, which need not show in these."""
    size = int(member.pax_headers.get(sparse.HEADER, member.size))
    age_ns = int(member.mtime * 1e9) - there.st_mtime_ns
    # The file has the second mode if the file system here can have no access control lists.
    modes = (member.mode & 0o7777, attributes.mode_without(member))
    same = member.isreg() and stat.S_ISREG(there.st_mode) and there.st_size == size
    same = same and stat.S_IMODE(there.st_mode) in modes
    mapped = forced and FORCED in member.pax_headers
    return same and abs(age_ns) < SAME_AGE_NS and not mapped
