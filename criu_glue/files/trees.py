# SPDX-License-Identifier: Apache-2.0
"""Sends directories that move with a capsule as tar streams: first everything, then the changes.

Pass one runs while the job runs. Pass two runs with the tasks frozen, so it is exact. A file has
changed if its size, mtime, ctime or inode differs. Pass two always sends files that a task maps
shared and writable, or has so mapped during pass one, since a store through such a mapping need not
change the mtime.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from . import below, sparse
from .below import GONE
from .entries import Entries, open_regular
from .walking import named, walk

BLOCK = 1 << 20
Stamp = tuple[int, int, int, int]
"""The state of a file by which a change is found: (size in bytes, mtime ns, ctime ns, inode)."""

FORCED = "LIVESHIFT.forced"
"""The header of an entry that also replaces a file of the same age, because a write through a
mapping may have changed the file."""

SAME_AGE_NS = 1000
"""Two times that differ by less than this many nanoseconds count as equal, because tar keeps times
as decimal fractions that round below a microsecond."""


@dataclass(frozen=True)
class Tree:
    """A directory that moves with the capsule, or only the files that ``only`` names in it."""

    name: str
    source: Path
    only: tuple[str, ...] | None = None


def listing(tree: Tree) -> dict[str, Stamp]:
    """Relative name → stamp, parents before children; what vanishes meanwhile is left out.

    Raises StepFailed as :func:`walk`."""
    seen = walk(tree.source) if tree.only is None else named(tree.source, tree.only)
    return {
        name: (s.size, s.mtime_ns, s.ctime_ns, s.inode)
        for name, s in seen
        if not stat.S_ISSOCK(s.mode)  # CRIU makes these again when it restores the socket
    }


def changed(before: dict[str, Stamp], now: dict[str, Stamp], always: Iterable[str]) -> list[str]:
    """The names of ``now`` that a second pass must send.

    A file of ``always`` is sent with all its names: the unpacker makes a new file for a name, and
    other names that it does not get would keep the old one. Names that are not in ``always`` come
    last. So the content goes with a name by which the file is mapped. A rewind takes only such
    names (putting_back.py).
    """
    named = set(always)
    again = all_names(named, now)
    names = [name for name, stamp in now.items() if name in again or before.get(name) != stamp]
    return sorted(names, key=lambda name: name in again and name not in named)


def all_names(names: Iterable[str], now: dict[str, Stamp]) -> set[str]:
    """The names in ``now`` of the files that have these names there (hard links)."""
    inodes = {now[name][3] for name in names if name in now}
    return {name for name, stamp in now.items() if stamp[3] in inodes}


def pack(
    tree: Tree, names: Iterable[str], write: Callable[[bytes], None], forced: Iterable[str] = ()
) -> None:
    """Send the named entries (directories without their content) as a tar stream.

    The ``forced`` entries also replace a file of the same age at the destination. Only the data of
    a file with holes is sent (sparse.py). A file that shrinks while pass one reads it is padded,
    and one that vanishes is left out; pass two sends it again.
    """
    writer = _Writer(write)
    with tarfile.open(mode="w", fileobj=cast(BinaryIO, writer)) as tar:
        tar.copybufsize = BLOCK  # type: ignore[attr-defined]
        always = frozenset(forced)
        for info, content in Entries(tree.source).of(names):
            if info.name in always:
                info.pax_headers = {**info.pax_headers, FORCED: "1"}
            with content or contextlib.nullcontext():
                tar.addfile(info, cast(BinaryIO, _content(info, content)) if content else None)
    writer.finish()


def _content(info: tarfile.TarInfo, file: BinaryIO) -> _Padded | sparse.Packed:
    """Return the reader of an entry's content, and change ``info`` if the holes of the file are not
    sent. The holes are sent if all of them are narrow, or if the file system has compressed the
    file."""
    if sparse.has_holes(file):
        packed = sparse.Packed(file)
        if packed.size < info.size:
            info.pax_headers = {**info.pax_headers, sparse.HEADER: str(packed.file_size)}
            info.size = packed.size
            return packed
    return _Padded(file, info.size)


def open_file(top: Path, name: str) -> BinaryIO:
    """Open a file without following a link, since the job may replace the file by a link at any
    time.

    Raises one of below.GONE if it is a link, or no regular file, now.
    """
    with below.opened(top) as directory, below.parent_of(directory, name) as (parent, last):
        return open_regular(parent, last)


def remove(root: Path, names: Iterable[str]) -> None:
    """Remove names that are gone at the source, children before parents; directories only if empty.

    Nothing is removed through a symbolic link or on another mount. If a directory has become a
    link, its children are gone already, and the files behind the link are different ones.
    """
    with below.opened(root) as top:
        for name in sorted(names, key=len, reverse=True):
            with (
                contextlib.suppress(OSError, below.UnfitName),
                below.parent_of(top, name, one_mount=True) as (parent, last),
            ):
                there = os.lstat(last, dir_fd=parent).st_mode
                (os.rmdir if stat.S_ISDIR(there) else os.unlink)(last, dir_fd=parent)


def unchanged(root: Path, stamps: Mapping[str, Sequence[int]]) -> set[str]:
    """The names whose files are those of their stamps (:func:`is_same`)."""
    same: set[str] = set()
    for name, stamp in stamps.items():
        with contextlib.suppress(*GONE):
            if is_same(os.lstat(root / name), stamp):
                same.add(name)
    return same


def is_same(there: os.stat_result, stamp: Sequence[int]) -> bool:
    """Whether a file has the size, mtime and inode of the stamp. The size and time of a directory
    change with what it contains, so only its inode counts."""
    size, mtime_ns, _, inode = stamp
    if stat.S_ISDIR(there.st_mode):
        return there.st_ino == inode
    return (there.st_size, there.st_mtime_ns, there.st_ino) == (size, mtime_ns, inode)


class _Writer:
    """Gathers what tarfile writes, mostly 512 bytes at a time, into blocks of ``BLOCK`` bytes.

    tarfile's own streams (mode "w|") do that too, but copy all that has gathered at each write.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= BLOCK:
            whole = b"".join(self._parts)
            end = self._size - self._size % BLOCK
            for at in range(0, end, BLOCK):
                self._write(whole[at : at + BLOCK])
            self._parts, self._size = [whole[end:]], self._size - end

    def tell(self) -> int:
        """tarfile asks where its archive begins."""
        return 0

    def finish(self) -> None:
        if self._size:
            self._write(b"".join(self._parts))


class _Padded:
    """Reads exactly ``size`` bytes from the beginning of a file, which may change meanwhile. It
    does not use the position of the descriptor, since looking for holes moves that."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._at = 0
        self._size = size

    def read(self, n: int) -> bytes:
        """Return ``n`` bytes, or what is left of ``size``; zeros where the file has become
        shorter."""
        n = min(n, self._size - self._at)
        data = b""
        while len(data) < n:
            part = os.pread(self._file.fileno(), n - len(data), self._at + len(data))
            if not part:
                break
            data += part
        self._at += n
        return data + bytes(n - len(data))
