# SPDX-License-Identifier: Apache-2.0
"""Finds events of inotify(7) that a program has not read yet.

CRIU makes the watches again, and drops the events ("inotify events will be dropped": criu,
fsnotify.c). A program that waits for one of them after a move would wait for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios

from ..files.lent import lent

TARGET = "anon_inode:inotify"
REMEDY = "the capsule can move once the program has read them"


def waiting(pid: int, fd: int) -> int:
    """How many bytes of events the inotify descriptor ``fd`` has; 0 if it is closed meanwhile."""
    with contextlib.suppress(OSError):
        ours = lent(pid, fd)
        try:
            (size,) = struct.unpack("i", fcntl.ioctl(ours, termios.FIONREAD, bytes(4)))
            return int(size)
        finally:
            os.close(ours)
    return 0


def words(who: str) -> str:
    return f"{who} has events of inotify that it has not read, which CRIU would drop"
