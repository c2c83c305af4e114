# SPDX-License-Identifier: Apache-2.0
"""The directories in which this host saves images, and from which it loads them.

Who can change an image can run any code as the job's user where it is restored, and who can read it
has the job's memory. So root alone may be able to change the directory, and what lies in it is for
root alone.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....errors import NotFound, Refused, StepFailed

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_trusted(directory: Path) -> None:
    """Raise Refused unless root alone can change what is in ``directory``, and NotFound if it is
    not there."""
    named = (directory, *directory.parents)  # perhaps links: who can change one leads us elsewhere
    try:
        directory = directory.resolve(strict=True)
        here = directory.stat()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL; RuntimeError: a loop
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise NotFound(
            f"{directory} cannot be used: {why}",
            hint="make it on a file system that all hosts share, for root alone (mode 0700)",
        ) from None
    if not stat.S_ISDIR(here.st_mode):
        raise Refused(f"{directory} is not a directory")
    for path in dict.fromkeys((directory, *directory.parents, *named)):
        found = path.lstat()
        others = found.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(found.st_mode)
        if found.st_uid != 0 or (
            others and (path == directory or not found.st_mode & stat.S_ISVTX)
        ):
            raise Refused(
                f"{directory} cannot be used: others than root can change {path}",
                hint="a user who can change an image runs code where it is restored:"
                " use a directory that root alone can change",
            )


def write_last(path: Path, data: bytes) -> None:
    """Write a file that says that what lies beside it is whole. It is there with all its data, or
    not at all. Raises OSError, FileExistsError if it is there already."""
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)  # not a link, which many a network file system does not have
    _sync(path.parent, path.parent.parent, path.parent.parent.parent)


def sync_below(top: Path) -> None:
    """Write all directories below ``top`` to the disk. Raises OSError."""
    _sync(*(path for path in top.rglob("*") if path.is_dir()))


def _sync(*directories: Path) -> None:
    for path in directories:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def all_or_nothing(target: Path, step: str, problem: str) -> Iterator[None]:
    """After an error nothing is left in ``target``. An OSError becomes the StepFailed of a step."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise StepFailed(step, f"{problem}: {error}") from error
        raise
