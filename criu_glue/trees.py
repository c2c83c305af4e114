# SPDX-License-Identifier: Apache-2.0
"""Directories that go along with a capsule, as tar streams: first all of it, then what changed.

Pass one is taken while the job runs, pass two with its tasks frozen, so two is exact. A change
is a different size, mtime, ctime or inode; files that a task maps shared and writable are taken
again in any case, since a store through such a mapping need not touch the mtime.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from . import below

BLOCK = 1 << 20
Stamp = tuple[int, int, int, int]
"""(size in bytes, mtime ns, ctime ns, inode)"""

FORCED = "LIVESHIFT.forced"
"""Header of an entry that replaces a file of the same age: it may have changed by a mapping."""

SAME_AGE_NS = 1000
"""tar keeps times as decimal fractions that round below a microsecond."""

GONE = (FileNotFoundError, NotADirectoryError)
"""What the kernel says of a name that was there a moment ago."""


@dataclass(frozen=True)
class Tree:
    """A directory that goes along, or (``only``) single files of it by relative name."""

    name: str
    source: Path
    destination: Path
    only: tuple[str, ...] | None = None


def listing(tree: Tree) -> dict[str, Stamp]:
    """Relative name → stamp, parents before children; what vanishes meanwhile is left out."""
    names = tree.only if tree.only is not None else _walk(tree.source)
    found: dict[str, Stamp] = {}
    for name in names:
        with contextlib.suppress(*GONE):
            s = os.lstat(tree.source / name)
            if not stat.S_ISSOCK(s.st_mode):  # bound again by CRIU with its socket
                found[name] = (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
    return found


def changed(before: dict[str, Stamp], now: dict[str, Stamp], always: Iterable[str]) -> list[str]:
    """The names of ``now`` that a second pass must send."""
    again = set(always)
    return [name for name, stamp in now.items() if name in again or before.get(name) != stamp]


def pack(
    tree: Tree, names: Iterable[str], write: Callable[[bytes], None], forced: Iterable[str] = ()
) -> None:
    """Send the named entries (directories without their content) as a tar stream.

    Those ``forced`` replace what is there whatever its age. A file that shrinks or vanishes while
    it is read in pass one is padded or left out: the second pass sends it again.
    """
    with tarfile.open(mode="w|", fileobj=cast(BinaryIO, _Writer(write)), bufsize=BLOCK) as tar:
        tar.copybufsize = BLOCK  # type: ignore[attr-defined]
        always = frozenset(forced)
        for name in names:
            try:
                seen = tar.gettarinfo(tree.source / name, arcname=name)
                info = cast(tarfile.TarInfo | None, seen)  # tarfile knows no sockets
                if info is None:
                    continue
                content = _open_file(tree.source, name) if info.isreg() else None
            except GONE:
                continue
            if content:
                info = tar.gettarinfo(arcname=name, fileobj=content)
            if name in always:
                info.pax_headers = {FORCED: "1"}
            with content or contextlib.nullcontext():
                tar.addfile(info, cast(BinaryIO, _Padded(content, info.size)) if content else None)


def _open_file(top: Path, name: str) -> BinaryIO:
    """Open a file through no link: a job may put one in its place while root looks elsewhere.

    Raises NotADirectoryError where a link is met.
    """
    with below.opened(top) as directory, below.parent_of(directory, name) as (parent, last):
        try:
            fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotADirectoryError(errno.ENOTDIR, "a link now", name) from error
            raise
        return os.fdopen(fd, "rb")


def remove(root: Path, names: Iterable[str]) -> None:
    """Remove what is gone at the source, children before parents; directories only once empty.

    Nothing is removed through a symbolic link: where a directory has become one, its children went
    with it, and those that the link leads to are others.
    """
    with below.opened(root) as top:
        for name in sorted(names, key=len, reverse=True):
            with (
                contextlib.suppress(OSError, below.UnfitName),
                below.parent_of(top, name) as (parent, last),
            ):
                there = os.lstat(last, dir_fd=parent).st_mode
                (os.rmdir if stat.S_ISDIR(there) else os.unlink)(last, dir_fd=parent)


def unchanged(root: Path, stamps: Mapping[str, Sequence[int]]) -> set[str]:
    """The names that are still what their stamps say (size, mtime, inode)."""
    same: set[str] = set()
    for name, (size, mtime_ns, _, inode) in stamps.items():
        with contextlib.suppress(*GONE):
            s = os.lstat(root / name)
            # A directory's size and time change with what is in it; it goes only when empty.
            if stat.S_ISDIR(s.st_mode) or (s.st_size, s.st_mtime_ns, s.st_ino) == (
                size, mtime_ns, inode,
            ):  # fmt: skip
                same.add(name)
    return same


def _walk(top: Path) -> Iterator[str]:
    """Everything below a directory, by relative name, staying on its file system."""
    if not top.is_dir():
        return
    device = os.lstat(top).st_dev
    yield "."
    for directory, folders, names in os.walk(top):
        relative = os.path.relpath(directory, top)
        folders[:] = [f for f in folders if _same_device(os.path.join(directory, f), device)]
        for name in (*folders, *names):
            yield os.path.normpath(os.path.join(relative, name))


def _same_device(path: str, device: int) -> bool:
    try:
        return os.lstat(path).st_dev == device
    except FileNotFoundError:
        return False


@dataclass
class _Writer:
    write: Callable[[bytes], object]


class _Padded:
    """Reads exactly ``size`` bytes of a file that may change meanwhile."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, n: int) -> bytes:
        n = min(n, self._left)
        data = self._file.read(n)
        self._left -= n
        return data + bytes(n - len(data))
