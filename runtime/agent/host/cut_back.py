# SPDX-License-Identifier: Apache-2.0
"""Cuts files on shared paths back to the sizes that they had at a snapshot, before its job goes on
from there. The job writes the rest again.

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
from ....criu_glue.files.rights import User, acting_as


def cut_back(
    user: User, sizes: Mapping[bytes, int], until: float = math.inf
) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the files that were cut, and the files that have changed but were
    not cut. ``sizes``: path → bytes at the snapshot. ``until``: monotonic seconds after which this
    cuts nothing any more, because a file system was slow.

    Raises LiveshiftError if the user's rights cannot be had.
    """

    def work() -> tuple[list[str], list[str]]:
        cut: list[str] = []
        left: list[str] = []
        for path, size in sorted(sizes.items()):
            name = path.decode(errors="backslashreplace")
            try:
                _cut(path, name, size, until, cut, left)
            except FileNotFoundError:
                pass  # the restore says so
            except OSError as error:
                left.append(f"{name} ({os.strerror(error.errno or errno.EIO)})")
        return cut, left

    return acting_as(user, work)


def _cut(path: bytes, name: str, size: int, until: float, cut: list[str], left: list[str]) -> None:
    # One that has not changed is not opened: the user may have no right to write it by now.
    if not _has_grown(os.stat(path, follow_symlinks=False), name, size, left):
        return
    # O_NONBLOCK: a pipe in its place must not block us.
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if _has_grown(found, name, size, left):
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
