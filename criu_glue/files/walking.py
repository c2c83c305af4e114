# SPDX-License-Identifier: Apache-2.0
"""Finds what lies below a directory that a job writes to, while the job runs.

The job may put a link in the place of a directory at any moment. Root would follow it into
directories that the job may not read, and list their names. So each directory is opened below the
top, without links (below.py), and what it contains is looked at by its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StepFailed
from . import below, statx
from .below import GONE
from .statx import Stat

_LEFT_OUT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""A directory whose open(2) fails like this is gone, a link, or on another mount by now. After any
other error the listing would lack files that are there."""


def walk(top: Path) -> Iterator[tuple[str, Stat]]:
    """Everything below a directory, by relative name, parents first.

    Directories and files on mounts below it are left out, even mounts of the same file system.
    Nothing behind a link is found. Raises StepFailed if a name is too long to be moved, or if root
    may not read a directory.
    """
    with _opened(top) as directory:
        if directory is None:
            return
        own = statx.fstat(directory)
        yield ".", own
        folders = [""]
        while folders:
            folder = folders.pop()
            for last, s in _inside(top, directory, folder):
                if s.mount != own.mount:
                    continue
                name = folder + last
                if len(os.fsencode(name)) >= below.PATH_MAX:
                    raise _too_long(top, name)
                yield name, s
                if stat.S_ISDIR(s.mode):
                    folders.append(name + "/")


def named(top: Path, names: Iterable[str]) -> Iterator[tuple[str, Stat]]:
    """Those of these names below a directory that are there, without following any link."""
    with _opened(top) as directory:
        if directory is None:
            return
        for name in names:
            try:
                with below.parent_of(directory, name) as (parent, last):
                    s = statx.lstat(last, parent)
            except GONE:
                continue
            yield name, s


@contextmanager
def _opened(top: Path) -> Iterator[int | None]:
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(below.opened(top))
        except GONE:
            yield None
        else:
            yield directory


def _inside(top: Path, directory: int, folder: str) -> Iterator[tuple[str, Stat]]:
    """What one folder below a directory contains."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        fd = below.open_below(directory, folder[:-1] or ".", flags, one_mount=True)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise _unreadable(top / folder) from error
        if error.errno not in _LEFT_OUT:
            raise
        return
    try:
        inside: list[str] = []
        with contextlib.suppress(*GONE):
            inside = os.listdir(fd)
        for last in inside:
            try:
                s = statx.lstat(last, fd)
            except GONE:
                continue
            yield last, s
    finally:
        os.close(fd)


def _unreadable(folder: Path) -> StepFailed:
    return StepFailed(
        "files",
        f"even root may not read the directory {str(folder)!a}, so its files cannot be moved",
        hint="if it lies on a network file system, list that under files.shared",
    )


def _too_long(top: Path, name: str) -> StepFailed:
    size = len(os.fsencode(name))
    return StepFailed(
        "files",
        f"a name below {top} has {size} bytes, and the longest that can be moved has"
        f" {below.PATH_MAX - 1}: it begins with {name[:100]!a}",
        hint="remove it, or rename one of its directories",
    )
