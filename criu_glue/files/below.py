# SPDX-License-Identifier: Apache-2.0
"""Reaches a name below a directory, and never anything outside of it.

Root works in directories that jobs write to, with names that come from other hosts. The kernel
resolves these names (openat2(2), Linux 5.6). It follows no symbolic link and does not leave the
directory, even while a job swaps the files there. With ``one_mount`` it also does not enter
anything that is mounted below the directory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPENAT2 = 437  # on every architecture
# linux/openat2.h
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
PATH_MAX, _NAME_MAX = 4096, 255  # linux/limits.h; bytes

GONE = (FileNotFoundError, NotADirectoryError)
"""The errors for a name that has vanished, or to which a link leads now."""

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class UnfitName(ValueError):
    """The name is not a plain path below a directory."""


class OtherMount(OSError):
    """The name leads onto another mount than its directory's."""


def plain(name: str) -> str:
    """Return the name if it is "." or a path of plain parts; raises UnfitName otherwise."""
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        raise UnfitName(f"{name[:100]!a} is no valid file name") from None
    parts = raw.split(b"/")
    if name != "." and (
        b"\0" in raw
        or len(raw) >= PATH_MAX
        or any(part in (b"", b".", b"..") or len(part) > _NAME_MAX for part in parts)
    ):
        raise UnfitName(f"{name[:100]!a} leads out of its directory or is no valid path")
    return name


@contextmanager
def opened(top: Path) -> Iterator[int]:
    """A directory's descriptor, for the functions below; ``top`` itself may contain links."""
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(top: int, name: str, flags: int, one_mount: bool = False) -> int:
    """Open ``name`` without following any link; raises OSError as open(2), ELOOP at a link,
    OtherMount."""
    resolve = _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS
    try:
        return _openat2(top, name, flags, resolve | (_NO_XDEV if one_mount else 0))
    except OSError as error:
        if one_mount and error.errno == errno.EXDEV:
            raise OtherMount(error.errno, "something else is mounted there", name) from error
        raise


def open_in_root(top: int, path: str, flags: int) -> int:
    """Open the file that a process whose root is ``top`` would open under an absolute path."""
    return _openat2(top, path, flags, _IN_ROOT | _NO_MAGICLINKS)


@contextmanager
def parent_of(
    top: int, name: str, make: bool = False, one_mount: bool = False
) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory that a name is in, and the name's last part; "." is in itself.

    ``make`` makes missing directories on the way. Raises NotADirectoryError if a link or another
    file stands in a directory's place, FileNotFoundError, OtherMount.
    """
    folder, _, last = plain(name).rpartition("/")
    fd = (_made if make else _directory)(top, folder or ".", one_mount)
    try:
        yield fd, last
    finally:
        os.close(fd)


def remove_all(parent: int, name: str) -> None:
    """Remove a directory and all that is in it. Raises OSError, or OtherMount before it removes
    files of a mount below the directory."""
    fd = open_below(parent, name, os.O_RDONLY | os.O_DIRECTORY, one_mount=True)
    try:
        for inside in os.listdir(fd):
            if stat.S_ISDIR(os.lstat(inside, dir_fd=fd).st_mode):
                remove_all(fd, inside)
            else:
                os.unlink(inside, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _made(top: int, folder: str, one_mount: bool) -> int:
    at = _directory(top, ".", one_mount)
    for part in folder.split("/"):
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=at)
        try:
            below = _directory(at, part, one_mount)
        finally:
            os.close(at)
        at = below
    return at


def _directory(top: int, folder: str, one_mount: bool) -> int:
    try:
        return open_below(top, folder, os.O_PATH | os.O_DIRECTORY, one_mount)
    except OtherMount:
        raise
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR):
            raise
        what = "no directory, or a link, on the way to"
        raise NotADirectoryError(errno.ENOTDIR, what, folder) from error


def _openat2(top: int, name: str, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    while True:
        fd: int = _libc.syscall(
            _OPENAT2, top, os.fsencode(name), ctypes.byref(how), ctypes.sizeof(how)
        )
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):  # EAGAIN: something was renamed meanwhile
            raise OSError(number, os.strerror(number), name)
