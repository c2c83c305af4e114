# SPDX-License-Identifier: Apache-2.0
"""Which files of a carried directory stay as they are when an image brings others of their names.

Other programs use the directory too, and may have a file open and write to it. So only a newer file
replaces one that is here. That rule does not hold for the capsule's own files: those that the same
image has put here, in pass one or as another entry, and those that the capsule left here when it
moved away (or that a failed move put here). While such a file is unchanged, what the capsule brings
replaces it, whatever the times say: a program may set them, and clocks of two hosts may differ.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Mapping, Sequence

from . import below, sparse
from .below import GONE
from .dress import dress
from .trees import FORCED, SAME_AGE_NS, Stamp

Stamps = Mapping[str, Sequence[int]]
"""Name → stamp of a file (:data:`trees.Stamp`)."""


class Sparing:
    """What is known of one carried directory while an image comes, in both of its passes.

    ``left``: the files that the capsule has left here. ``made``: the directory itself was made for
    this image.
    """

    def __init__(self, left: Stamps | None = None, *, made: bool = False) -> None:
        self.placed: dict[str, Stamp] = {}
        """What this image has put here."""
        self._left = left or {}
        self._made = made

    def keeps(self, member: tarfile.TarInfo, parent: int, last: str) -> bool:
        """Whether the file ``last`` in the directory ``parent`` stays, and the entry is left out.

        A file that the capsule left here stays too if it has the entry's size and time; it gets the
        entry's owner and mode then. Another program may have it open.
        """
        try:
            there = os.lstat(last, dir_fd=parent)
        except GONE:
            return False
        if member.name == ".":
            return not self._made
        if is_same(there, self.placed.get(member.name)):
            return False
        if not is_same(there, self._left.get(member.name)):
            return _is_as_new(member, there)
        if not (member.isreg() and _is_alike(member, there)):
            return False
        _dress_anew(member, there, parent, last)
        return True

    def note(self, member: tarfile.TarInfo, parent: int, last: str) -> None:
        """The entry has been put there."""
        there = os.lstat(last, dir_fd=parent)
        self.placed[member.name] = (
            there.st_size,
            there.st_mtime_ns,
            there.st_ctime_ns,
            there.st_ino,
        )


def is_same(there: os.stat_result, stamp: Sequence[int] | None) -> bool:
    """Whether that is the file of the stamp, and unchanged. A directory's size and time change with
    what it contains, so only its inode counts."""
    if stamp is None:
        return False
    size, mtime_ns, _, inode = stamp
    if stat.S_ISDIR(there.st_mode):
        return there.st_ino == inode
    return (there.st_size, there.st_mtime_ns, there.st_ino) == (size, mtime_ns, inode)


def _is_as_new(member: tarfile.TarInfo, there: os.stat_result) -> bool:
    """True if the file here is as new as the entry, so another program may be using it."""
    if member.isdir():
        return stat.S_ISDIR(there.st_mode)
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
