# SPDX-License-Identifier: Apache-2.0
"""Makes a file on a shared path again that was renamed since a snapshot.

Many programs write a checkpoint under another name, and rename it when it is complete. If a
snapshot falls in between, the restored program goes on with that other name. No file has it by
then, or the next checkpoint has. The file itself is in the same directory, under its new name, and
may have grown: what it was at the snapshot is its beginning.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time

from ....criu_glue.files import statx
from ....criu_glue.files.statx import Identity
from ....errors import LiveshiftError

CHUNK = 8 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block us


class NotMade(LiveshiftError):
    """The file could not be made again; the text is a remark for the history."""


def make_again(path: bytes, size: int, known: Identity, until: float) -> str:
    """Make the file ``path`` with the first ``size`` bytes of the ``known`` file.

    What has the name now is kept, under a name that no file has. ``until``: monotonic seconds after
    which nothing is made any more. Returns what was done, in words, or "" if it had been done.
    Raises NotMade, OSError, and FileNotFoundError if it is not in its directory any more.
    """
    folder, last = os.path.split(path)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        now = _named(directory, known[0])
        old = os.open(now, _OLD, dir_fd=directory)
        try:
            found = os.fstat(old)
            if not stat.S_ISREG(found.st_mode) or not statx.is_same(statx.identity(old), known):
                raise FileNotFoundError(path)
            if found.st_size < size:
                raise NotMade(f"it is {_text(now)} now, and shorter than it was")
            return _make(directory, last, old, size, until, now)
        finally:
            os.close(old)
    finally:
        os.close(directory)


def _named(directory: int, inode: int) -> bytes:
    with os.scandir(directory) as inside:
        for entry in inside:
            if entry.inode() == inode and entry.is_file(follow_symlinks=False):
                return os.fsencode(entry.name)
    raise FileNotFoundError(f"no file has the inode {inode}")


def _make(directory: int, last: bytes, old: int, size: int, until: float, now: bytes) -> str:
    there = _mode(directory, last)
    if there is not None:
        if not stat.S_ISREG(there):
            raise NotMade(f"it is {_text(now)} now, and no regular file has its name")
        if _has_begun_so(directory, last, old, size):
            return ""
    part = last + b".liveshift-part"
    with contextlib.suppress(FileNotFoundError):  # of an attempt that was interrupted
        os.unlink(part, dir_fd=directory)
    new = os.open(part, _NEW, 0o600, dir_fd=directory)
    try:
        _copy(old, new, size, until)
        os.fchmod(new, os.fstat(old).st_mode & 0o777)
        if time.monotonic() > until:
            raise NotMade("its file system took too long")
        words = f"made again from {_text(now)}"
        if there is not None:
            aside = _free_name(directory, last)
            os.rename(last, aside, src_dir_fd=directory, dst_dir_fd=directory)
            words += f"; what had its name is {_text(aside)}"
        os.rename(part, last, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=directory)
        raise
    finally:
        os.close(new)
    return words


def _mode(directory: int, last: bytes) -> int | None:
    try:
        return os.stat(last, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _has_begun_so(directory: int, last: bytes, old: int, size: int) -> bool:
    """Whether the file of that name has this size and content: then an earlier request made it."""
    file = os.open(last, _OLD, dir_fd=directory)
    try:
        return os.fstat(file).st_size == size and all(
            os.pread(file, min(CHUNK, size - at), at) == os.pread(old, min(CHUNK, size - at), at)
            for at in range(0, size, CHUNK)
        )
    finally:
        os.close(file)


def _copy(old: int, new: int, size: int, until: float) -> None:
    at = 0
    while at < size:
        if time.monotonic() > until:
            raise NotMade("its file system took too long")
        data = os.pread(old, min(CHUNK, size - at), at)
        if not data:
            raise NotMade("it has become shorter meanwhile")
        at += len(data)
        while data:
            data = data[os.write(new, data) :]


def _free_name(directory: int, last: bytes) -> bytes:
    for number in itertools.count(1):
        name = last + b".before-rewind-%d" % number
        if _mode(directory, name) is None:
            return name
    raise AssertionError("unreachable")


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
