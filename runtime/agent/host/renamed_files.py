# SPDX-License-Identifier: Apache-2.0
"""Makes a file on a shared path again that was renamed since a snapshot.

Many programs write a checkpoint under another name, and rename it when it is complete. If a
snapshot falls in between, the restored program goes on with that other name. No file has it by
then, or the next checkpoint has. The file itself is in the same directory, under its new name, and
may have grown: what it was at the snapshot is its beginning.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time

from ....criu_glue.files import statx
from ....criu_glue.files.identity import Identity
from ....errors import LiveshiftError

CHUNK = 8 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block us


class NotMade(LiveshiftError):
    """A file could not be made again. The text of the error is a remark for the history."""


def make_again(path: bytes, size: int, known: Identity, until: float) -> str:
    """Make the file ``path`` with the first ``size`` bytes of the ``known`` file.

    If another file has the name now, that one gets a new name. ``until``: monotonic seconds after
    which this makes nothing any more. Returns what it has done, in words; "" if an earlier call had
    done it. Raises NotMade, OSError, and FileNotFoundError if the known file is not in its
    directory any more.
    """
    folder, last = os.path.split(path)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        now = _named(directory, known.inode)
        old = os.open(now, _OLD, dir_fd=directory)
        try:
            found = os.fstat(old)
            if not stat.S_ISREG(found.st_mode) or not known.is_of(
                statx.identity(f"/proc/self/fd/{old}")
            ):
                raise FileNotFoundError(path)
            if found.st_size < size:
                raise NotMade(f"it is {_text(now)} now, and shorter than it was")
            return _make(directory, last, old, size, known.mode, until, now)
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


def _make(
    directory: int, last: bytes, old: int, size: int, mode: int, until: float, now: bytes
) -> str:
    there = _mode(directory, last)
    if there is not None:
        if not stat.S_ISREG(there):
            raise NotMade(f"it is {_text(now)} now, and no regular file has its name")
        if _has_begun_so(directory, last, old, size, until):
            return ""
    part = last + b".liveshift-part"
    with contextlib.suppress(FileNotFoundError):  # of an attempt that was interrupted
        os.unlink(part, dir_fd=directory)
    new = os.open(part, _NEW, 0o600, dir_fd=directory)
    try:
        _copy(old, new, size, until)
        _give_group(old, new)
        os.fchmod(new, mode & 0o777)
        _check_time(until)
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


def _has_begun_so(directory: int, last: bytes, old: int, size: int, until: float) -> bool:
    """Return whether the file of that name has this size and content. If so, an earlier request has
    made it."""
    file = os.open(last, _OLD, dir_fd=directory)
    try:
        if os.fstat(file).st_size != size:
            return False
        for at in range(0, size, CHUNK):
            _check_time(until)
            count = min(CHUNK, size - at)
            if os.pread(file, count, at) != os.pread(old, count, at):
                return False
        return True
    finally:
        os.close(file)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise NotMade("its file system took too long")


def _give_group(old: int, new: int) -> None:
    group = os.fstat(old).st_gid
    if os.fstat(new).st_gid == group:
        return
    try:
        os.fchown(new, -1, group)
    except PermissionError as error:
        raise NotMade(f"the job's user cannot give it its group {group} back") from error


def _copy(old: int, new: int, size: int, until: float) -> None:
    at = 0
    while at < size:
        _check_time(until)
        done = _copy_some(old, new, at, min(CHUNK, size - at))
        if not done:
            raise NotMade("it has become shorter meanwhile")
        at += done


def _copy_some(old: int, new: int, at: int, count: int) -> int:
    """Let the file system copy, or its server, if it can; return how many bytes are copied."""
    try:
        return os.copy_file_range(old, new, count, at, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return os.pwrite(new, os.pread(old, count, at), at)


def _free_name(directory: int, last: bytes) -> bytes:
    for number in itertools.count(1):
        name = last + b".before-rewind-%d" % number
        if _mode(directory, name) is None:
            return name
    raise AssertionError("unreachable")


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
