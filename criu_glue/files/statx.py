# SPDX-License-Identifier: Apache-2.0
"""statx(2): what lstat(2) reports of a file, and the mount on which the file lies.

A bind mount of the same file system has the device number of its surroundings. Only the mount id
(STX_MNT_ID, Linux 5.8) differs. Python offers no statx before 3.15.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import NamedTuple

from .identity import Identity

_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_NO_AUTOMOUNT, _AT_EMPTY_PATH = -100, 0x100, 0x800, 0x1000
_BASIC, _BTIME, _MNT_ID = 0x7FF, 0x800, 0x1000
_BUFFER = 256  # bytes; linux/stat.h, struct statx
_HEAD = struct.Struct("<28xH2xQQQ")  # mode, inode, size, blocks
_TIME = struct.Struct("<qI")
_BTIME_AT, _CTIME_AT, _MTIME_AT, _MOUNT_AT = 80, 96, 112, 144

_statx = ctypes.CDLL(None, use_errno=True).statx


class Stat(NamedTuple):
    """``mount`` is the mount id, as in /proc/PID/mountinfo; ``blocks`` are of 512 bytes."""

    mode: int
    inode: int
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int
    mount: int


def lstat(path: str | Path, dir_fd: int = _AT_FDCWD) -> Stat:
    """The Stat of the path itself, even if it is a link. Raises OSError as lstat(2)."""
    return _ask(path, _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT, dir_fd)


def fstat(fd: int) -> Stat:
    """The Stat of an open file. Raises OSError as fstat(2)."""
    return _ask("", _AT_EMPTY_PATH, fd)


def stat(path: str | Path) -> Stat:
    """The Stat of the file to which the path leads. Raises OSError as stat(2)."""
    return _ask(path, 0)


def _ask(path: str | Path, flags: int, dir_fd: int = _AT_FDCWD) -> Stat:
    raw = _buffer(path, flags, _BASIC | _MNT_ID, dir_fd)
    mode, inode, size, blocks = _HEAD.unpack_from(raw)
    (mount,) = struct.unpack_from("<Q", raw, _MOUNT_AT)
    return Stat(
        mode, inode, size, blocks, _time_ns(raw, _MTIME_AT), _time_ns(raw, _CTIME_AT), mount
    )


def _buffer(
    path: str | Path, flags: int, wanted: int, dir_fd: int = _AT_FDCWD
) -> ctypes.Array[ctypes.c_char]:
    raw = ctypes.create_string_buffer(_BUFFER)
    if _statx(dir_fd, os.fsencode(path), flags, wanted, raw) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return raw


def born_ns(path: str | Path) -> int:
    """When the file was made; 0 if its file system does not know. Raises OSError as stat(2)."""
    raw = _buffer(path, 0, _BTIME)
    (known,) = struct.unpack_from("<I", raw)
    return _time_ns(raw, _BTIME_AT) if known & _BTIME else 0


def identity(path: str) -> Identity:
    """Return the Identity of the file to which a path leads. Raises OSError as stat(2)."""
    found = stat(path)
    return Identity(found.inode, born_ns(path), found.mode & 0o7777)


def _time_ns(raw: ctypes.Array[ctypes.c_char], at: int) -> int:
    seconds, ns = _TIME.unpack_from(raw, at)
    return int(seconds) * 10**9 + int(ns)
