# SPDX-License-Identifier: Apache-2.0
"""What ``run`` takes from its caller, and what it does not take: environment and stdin."""

from __future__ import annotations

import array
import fcntl
import os
import stat
import termios
from collections.abc import Callable
from pathlib import Path

COERCED = "LC_CTYPE"
"""Python sets this variable at its own start if the caller's locale is C (PEP 538)."""

STDIN = 0
UNREAD = (
    "the command's standard input is empty: what comes on stdin here does not reach it. Put it in a"
    " file on a path that all hosts see, and let the command read that:"
    " liveshift run -- sh -c 'COMMAND < FILE'"
)


def environment(warn: Callable[[str], None]) -> dict[str, str]:
    """Return the caller's environment. It has what liveshift has changed in its own since its
    start, but not what Python has changed. Variables that are not UTF-8 are named and left out."""
    found = dict(os.environ)
    if COERCED in found:
        try:
            given = _given()
        except OSError:  # no /proc: the variable stays
            given = {COERCED: found[COERCED]}
        del found[COERCED]
        if COERCED in given:
            found[COERCED] = given[COERCED]
    for key in [key for key, value in found.items() if not (is_text(key) and is_text(value))]:
        warn(f"{key!r} is left out of the job's environment: it is not UTF-8")
        del found[key]
    return found


def _given() -> dict[str, str]:
    """Return the environment with which this process was started; raises OSError."""
    given: dict[str, str] = {}
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0"):
        key, _, value = entry.partition(b"=")
        given.setdefault(os.fsdecode(key), os.fsdecode(value))  # of two, Python takes the first
    return given


def note_stdin(note: Callable[[str], None]) -> None:
    """Call ``note`` once if something waits on stdin now: the command will not get it.

    An empty pipe or a socket says nothing: many programs that start others leave one there.
    """
    if _waiting(STDIN):
        note(UNREAD)


def _waiting(fd: int) -> int:
    """Return the bytes that can be read from a pipe or regular file; 0 for all else."""
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            return max(0, found.st_size - os.lseek(fd, 0, os.SEEK_CUR))
        if stat.S_ISFIFO(found.st_mode):
            waiting = array.array("i", [0])
            fcntl.ioctl(fd, termios.FIONREAD, waiting)
            return waiting[0]
    except OSError:  # it is closed
        pass
    return 0


def is_text(value: str) -> bool:
    """Whether a value can go over the wire: bytes that are no UTF-8 come as surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
