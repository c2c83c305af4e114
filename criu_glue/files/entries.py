# SPDX-License-Identifier: Apache-2.0
"""Makes the entries of a tar stream, while the job may put anything in a file's place.

tarfile's own gettarinfo looks at files by their paths, and so through links in a directory's place.
It also asks for the names of owner and group, two calls of NSS for each entry. A call may wait for
a server, also while the job is frozen, and who unpacks uses the numbers only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from . import attributes, below
from .below import GONE

_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
"""Sockets are missing: CRIU makes them again when it restores them."""

_WITH_ATTRIBUTES = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)

_REPLACED = {
    errno.ELOOP: "a link now",
    errno.ENXIO: "a socket now",
    errno.EINVAL: "no link any more",  # from readlink(2)
}

Entry = tuple[tarfile.TarInfo, BinaryIO | None]
"""An entry, and the content of a regular file, which the taker closes."""


class Entries:
    """Makes the entries of one stream; remembers the files in it, for their further names."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._first: dict[tuple[int, int], str] = {}  # device and inode → the name with the content

    def of(self, names: Iterable[str]) -> Iterator[Entry]:
        """The entries of these names below the top; sockets, and what has vanished or become
        something else since it was looked at, are left out. Take each entry before the next."""
        for name, parent in _with_parents(self._top, names):
            try:
                made = self._make(name, parent)
            except GONE:
                continue
            if made is not None:
                yield made

    def _make(self, name: str, parent: int) -> Entry | None:
        last = name.rpartition("/")[2]
        seen = os.lstat(last, dir_fd=parent)
        if (kind := _TYPES.get(stat.S_IFMT(seen.st_mode))) is None:
            return None
        info, content = tarfile.TarInfo(name), None
        if kind == tarfile.REGTYPE:
            first = self._first.get((seen.st_dev, seen.st_ino)) if seen.st_nlink > 1 else None
            if first is not None:
                kind, info.linkname = tarfile.LNKTYPE, first
            else:
                content = open_regular(parent, last)
                seen = os.fstat(content.fileno())  # of the file that is read
                info.size = seen.st_size
                self._first[seen.st_dev, seen.st_ino] = name
        elif kind == tarfile.SYMTYPE:
            with _may_be_replaced(name):
                info.linkname = os.readlink(last, dir_fd=parent)
        elif kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            info.devmajor, info.devminor = os.major(seen.st_rdev), os.minor(seen.st_rdev)
        info.type, info.mode, info.mtime = kind, seen.st_mode, seen.st_mtime
        info.uid, info.gid = seen.st_uid, seen.st_gid
        if kind in _WITH_ATTRIBUTES:
            file = content.fileno() if content is not None else f"/proc/self/fd/{parent}/{last}"
            attributes.add(info, attributes.read(file))
        return info, content


def open_regular(parent: int, last: str) -> BinaryIO:
    """Open a regular file in the directory ``parent``. Never waits, as at a FIFO without a writer.

    Raises one of GONE if a link or something else has taken its place."""
    with _may_be_replaced(last):
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file any more", last)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def _may_be_replaced(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (what := _REPLACED.get(error.errno or 0)) is None:
            raise
        raise FileNotFoundError(errno.ENOENT, what, name) from error


def _with_parents(top: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Each name and a descriptor of the directory that it is in, which is opened once for names in
    a row. Names whose directory is gone, or is a link now, are left out."""
    for _, group in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
        inside = list(group)
        with contextlib.ExitStack() as stack:
            try:
                directory = stack.enter_context(below.opened(top))
                parent, _ = stack.enter_context(below.parent_of(directory, inside[0]))
            except GONE:
                continue
            for name in inside:
                yield name, parent
