# SPDX-License-Identifier: Apache-2.0
"""Cuts files on shared paths back to the sizes that they had at a snapshot, before its job goes on
from there. The job writes the rest again. A file that was renamed since is made again.

The agent acts with the rights of the job's user, and follows no link. So it changes no file that
this user could not change, even if the job has exchanged a path meanwhile.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Mapping

from .... import units
from ....criu_glue.files import statx
from ....criu_glue.files.identity import Identity
from ....criu_glue.files.rights import User, acting_as
from . import renamed_files


def cut_back(
    user: User,
    sizes: Mapping[bytes, int],
    until: float = math.inf,
    identities: Mapping[bytes, Identity] | None = None,
) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the files that were cut or made again, and the files that have
    changed but were not. ``sizes``: path → bytes at the snapshot. ``until``: monotonic seconds
    after which this changes nothing any more, because a file system was slow. ``identities``: of
    those of which it is known.

    Raises LiveshiftError if the user's rights cannot be had.
    """

    def work() -> tuple[list[str], list[str]]:
        cut: list[str] = []
        left: list[str] = []
        for path, size in sorted(sizes.items()):
            name = path.decode(errors="backslashreplace")
            try:
                known = (identities or {}).get(path)
                if known is not None and not _is_still(path, known):
                    if _make_again(path, name, size, known, until, cut, left):
                        continue
                    known = None  # what has the name now is all that there is
                _cut(path, name, size, known, until, cut, left)
            except FileNotFoundError:
                pass  # the restore says so
            except OSError as error:
                left.append(f"{name} ({os.strerror(error.errno or errno.EIO)})")
        return cut, left

    return acting_as(user, work)


def _is_still(path: bytes, known: Identity) -> bool:
    """Whether that file has its name still, or again. What is no regular file counts as such."""
    try:
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        return not regular or known.is_of(statx.identity(file))
    finally:
        os.close(file)


def _make_again(
    path: bytes,
    name: str,
    size: int,
    known: Identity,
    until: float,
    cut: list[str],
    left: list[str],
) -> bool:
    """Return whether that file is in its directory still, under another name."""
    try:
        if words := renamed_files.make_again(path, size, known, until):
            cut.append(f"{name} ({words})")
    except renamed_files.NotMade as error:
        left.append(f"{name} ({error})")
    except FileNotFoundError:
        return False
    return True


def _cut(
    path: bytes,
    name: str,
    size: int,
    known: Identity | None,
    until: float,
    cut: list[str],
    left: list[str],
) -> None:
    # One that has not changed is not opened: the user may have no right to write it by now.
    if not _has_grown(os.stat(path, follow_symlinks=False), name, size, left):
        return
    # O_NONBLOCK: a pipe in its place must not block us.
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if known is not None and not known.is_of(statx.identity(file)):
            left.append(f"{name} (another file has taken its name just now)")
        elif _has_grown(found, name, size, left):
            if time.monotonic() > until:
                left.append(f"{name} (its file system took too long)")
                return
            os.ftruncate(file, size)
            cut.append(f"{name} (by {units.size(found.st_size - size)})")
    finally:
        os.close(file)


def _has_grown(found: os.stat_result, name: str, size: int, left: list[str]) -> bool:
    if not stat.S_ISREG(found.st_mode):
        return False
    if found.st_size < size:
        left.append(f"{name} (it is shorter than it was: {found.st_size} bytes, not {size})")
    return found.st_size > size
