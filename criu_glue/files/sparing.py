# SPDX-License-Identifier: Apache-2.0
"""Decides which files of a carried directory stay when an image brings others of their names.

Other programs use the directory too, and may have a file open and write to it. So only a newer file
replaces one that is here. That rule does not hold for the capsule's own files: those that the same
image has put here, in pass one or as another entry, and those that the capsule left here when it
moved away (or that a failed move put here). While such a file is unchanged, what the capsule brings
replaces it, whatever the times say: a program may set them, and clocks of two hosts may differ.
Another program may have one of them open all the same, so it is replaced only if the capsule has
changed it.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...errors import StepFailed
from . import below, sparse
from .below import GONE
from .dress import dress
from .trees import FORCED, SAME_AGE_NS, Stamp, is_same

Stamps = Mapping[str, Sequence[int]]
"""Name → stamp of a file (:data:`trees.Stamp`)."""


class Sparing:
    """What is known of one carried directory while an image comes, in both of its passes.

    ``left``: the files that the capsule has left here. ``made``: the directory itself was made for
    this image.
    """

    def __init__(self, left: Stamps | None = None, *, made: bool = False) -> None:
        self.placed: dict[str, Stamp] = {}
        """The files that this image has put here: name → stamp."""
        self._left = left or {}
        self._made = made

    def keeps(self, member: tarfile.TarInfo, parent: int, last: str) -> bool:
        """Whether the file ``last`` in the directory ``parent`` stays, and the entry is left out.

        A file that the capsule left here stays too if it has the entry's size and time; it gets the
        entry's owner and mode then. Another program may have it open. Raises StepFailed if another
        program's newer file is where a directory has to be.
        """
        try:
            there = os.lstat(last, dir_fd=parent)
        except GONE:
            return False
        if member.name == ".":
            return not self._made
        if self._was_placed(member.name, there):
            return False
        if member.isdir() and stat.S_ISDIR(there.st_mode):
            return True
        if not self._was_left(member.name, there):
            if _is_as_new(member, there):
                _check_is_no_obstacle(member)
                return True
            return False
        if stat.S_ISFIFO(there.st_mode):
            return member.isfifo()
        if not (member.isreg() and _is_alike(member, there)):
            return False
        _dress_anew(member, there, parent, last)
        return True

    def _was_placed(self, name: str, there: os.stat_result) -> bool:
        """Whether this image has put that file here, and no program has written to it since."""
        stamp = self.placed.get(name)
        return stamp is not None and is_same(there, stamp)

    def _was_left(self, name: str, there: os.stat_result) -> bool:
        """Whether the capsule left that file here, and neither content nor rights have changed."""
        stamp = self._left.get(name)
        return stamp is not None and is_same(there, stamp) and there.st_ctime_ns == stamp[2]

    def remove_directory(self, name: str, parent: int, last: str) -> None:
        """Remove a directory, where the image brings something else, and the capsule's own files in
        it. Raises StepFailed if there are others."""
        fd = below.open_below(parent, last, os.O_RDONLY | os.O_DIRECTORY, one_mount=True)
        try:
            for inside in os.listdir(fd):
                path, there = f"{name}/{inside}", os.lstat(inside, dir_fd=fd)
                if stat.S_ISDIR(there.st_mode):
                    self.remove_directory(path, fd, inside)
                elif self._was_placed(path, there) or self._was_left(path, there):
                    os.unlink(inside, dir_fd=fd)
                else:
                    raise StepFailed(
                        "files",
                        f"{name} is a directory on this host, in which another program has"
                        f" {inside!a}, and no directory at the source",
                        hint="move it away",
                    )
        finally:
            os.close(fd)
        os.rmdir(last, dir_fd=parent)

    def note(self, member: tarfile.TarInfo, parent: int, last: str) -> None:
        """Remember that the entry was put there."""
        with suppress(*GONE):  # another program has taken it away at once
            s = os.lstat(last, dir_fd=parent)
            self.placed[member.name] = (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)


def _check_is_no_obstacle(member: tarfile.TarInfo) -> None:
    if member.isdir():
        raise StepFailed(
            "files",
            f"{member.name} is a directory at the source; another program has a link, or a file, of"
            " this name on this host",
            hint="move it away, or make the directory the same on all hosts",
        )


def _is_as_new(member: tarfile.TarInfo, there: os.stat_result) -> bool:
    """True if the file here is as new as the entry, so another program may be using it."""
    age_ns = _age_ns(member, there)
    return age_ns < SAME_AGE_NS and not (FORCED in member.pax_headers and age_ns > -SAME_AGE_NS)


def _is_alike(member: tarfile.TarInfo, there: os.stat_result) -> bool:
    size = int(member.pax_headers.get(sparse.HEADER, member.size))
    return (
        FORCED not in member.pax_headers
        and there.st_size == size
        and abs(_age_ns(member, there)) < SAME_AGE_NS
    )


def _age_ns(member: tarfile.TarInfo, there: os.stat_result) -> int:
    """By how much the entry is newer."""
    return int(member.mtime * 1e9) - there.st_mtime_ns


def _dress_anew(member: tarfile.TarInfo, there: os.stat_result, parent: int, last: str) -> None:
    now = (there.st_uid, there.st_gid, stat.S_IMODE(there.st_mode))
    if now == (member.uid, member.gid, stat.S_IMODE(member.mode)):
        return
    fd = below.open_below(parent, last, os.O_PATH)
    try:
        if os.fstat(fd).st_ino == there.st_ino:
            dress(fd, member, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
