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
from collections.abc import Collection, Mapping

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
    appended: Collection[bytes] = (),
) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the files that were cut or made again, and those that have changed
    and stay as they are.

    ``sizes``: path → bytes at the snapshot. ``identities``: path → which file had the path then; a
    file system may not tell. ``appended``: the paths of files that were open only for appending.
    A program may have renamed such a file since, as logrotate does. Then another file has the path,
    and it stays as it is. It also stays if its identity is not known. ``until``: no file is changed
    after this moment (monotonic seconds), because a file system was slow. Raises LiveshiftError if
    this process cannot take on the user's rights.
    """
    work = _CuttingBack(until)

    def all_files() -> None:
        for path, size in sorted(sizes.items()):
            known = (identities or {}).get(path)
            work.go_back(path, size, known, remade=path not in appended)

    acting_as(user, all_files)
    return work.cut, work.left


class _CuttingBack:
    """Goes from file to file. ``cut`` and ``left`` are the lists that :func:`cut_back` returns."""

    def __init__(self, until: float) -> None:
        self.cut: list[str] = []
        self.left: list[str] = []
        self._until = until

    def go_back(self, path: bytes, size: int, known: Identity | None, *, remade: bool) -> None:
        """Give a file the size that it had. ``known`` identifies the file that had the path; it is
        None if its file system does not tell. If ``remade``, a file that was renamed is made
        again."""
        name = path.decode(errors="backslashreplace")
        try:
            if not remade and (known is None or not _is_still(path, known)):
                if os.stat(path, follow_symlinks=False).st_size != size:
                    self.left.append(f"{name} (another file may have its name since)")
                return
            if known is not None and not _is_still(path, known):
                if self._make_again(path, name, size, known):
                    return
                known = None  # what has the name now is all that there is
            self._cut(path, name, size, known)
        except FileNotFoundError:
            pass  # the restore says so
        except OSError as error:
            self.left.append(f"{name} ({os.strerror(error.errno or errno.EIO)})")

    def _make_again(self, path: bytes, name: str, size: int, known: Identity) -> bool:
        """Return whether that file is in its directory still, under another name."""
        try:
            if words := renamed_files.make_again(path, size, known, self._until):
                self.cut.append(f"{name} ({words})")
        except renamed_files.NotMade as error:
            self.left.append(f"{name} ({error})")
        except FileNotFoundError:
            return False
        return True

    def _cut(self, path: bytes, name: str, size: int, known: Identity | None) -> None:
        # One that has not changed is not opened: the user may have no right to write it by now.
        if not self._has_grown(os.stat(path, follow_symlinks=False), name, size):
            return
        # O_NONBLOCK: a pipe in its place must not block us.
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if known is not None and not known.is_of(statx.identity(f"/proc/self/fd/{file}")):
                self.left.append(f"{name} (another file has taken its name just now)")
            elif self._has_grown(found, name, size):
                if time.monotonic() > self._until:
                    self.left.append(f"{name} (its file system took too long)")
                    return
                os.ftruncate(file, size)
                self.cut.append(f"{name} (by {units.size(found.st_size - size)})")
        finally:
            os.close(file)

    def _has_grown(self, found: os.stat_result, name: str, size: int) -> bool:
        if not stat.S_ISREG(found.st_mode):
            return False
        if found.st_size < size:
            text = f"it is shorter than it was: {found.st_size} bytes, not {size}"
            self.left.append(f"{name} ({text})")
        return found.st_size > size


def _is_still(path: bytes, known: Identity) -> bool:
    """Return whether the known file still has the path. A device or a pipe counts as such."""
    try:
        file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        return not regular or known.is_of(statx.identity(f"/proc/self/fd/{file}"))
    finally:
        os.close(file)
