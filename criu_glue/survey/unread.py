# SPDX-License-Identifier: Apache-2.0
"""Finds data that a program has not read yet, and that CRIU would drop or alter.

Events of inotify(7): CRIU makes the watches again, and drops the events ("inotify events will be
dropped": criu, fsnotify.c). A program that waits for one of them would wait for ever.

Data on a pseudo-terminal: CRIU reads it, and writes it into the terminal again, also where the
program goes on at once (criu: tty.c, tty_do_writeback). There it goes through the terminal's modes
a second time: line ends are doubled, input is echoed again. Of more than 16 KiB the rest is lost,
and the restore may wait for ever. In raw mode a little data comes back as it was. The end of a
terminal is lost too: where its last program has closed it, reading waits for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios

from ..files.lent import lent

EVENTS = "anon_inode:inotify"
MASTERS = ("/dev/ptmx", "/dev/pts/ptmx")
TERMINALS = "/dev/pts/"
REMEDY = "the capsule can move once the program has read it"

MOST = 4000
"""So many bytes on a terminal in raw mode come back as they were. The kernel shows 4095 at most:
those in the line discipline's buffer (linux: n_tty.c)."""


def look(pid: int, fd: int, target: str) -> str:
    """Return what the program has not read from its descriptor ``fd``. The text follows "it has".

    Returns "" if that prevents no move, or if the program has just closed the descriptor.
    ``target``: the file of the descriptor, as /proc/PID/fd shows it."""
    if target != EVENTS and not target.startswith((TERMINALS, *MASTERS)):
        return ""
    with contextlib.suppress(OSError, termios.error):
        ours = lent(pid, fd)
        try:
            if target == EVENTS:
                return "events of inotify that it has not read" if _waiting(ours) else ""
            return _on_terminal(ours, target)
        finally:
            os.close(ours)
    return ""


def words(who: str, what: str) -> str:
    return f"{who} has {what}, which CRIU would drop or alter"


def _on_terminal(fd: int, target: str) -> str:
    if target in MASTERS and _hung_up(fd):
        return "the end of a terminal that its last program has closed"
    _, output, _, local, *_ = termios.tcgetattr(fd)
    raw = not (output & termios.OPOST or local & (termios.ICANON | termios.ECHO))
    if _waiting(fd) > (MOST if raw else 0):
        return f"data on the terminal {target} that is not read"
    return ""


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _waiting(fd: int) -> int:
    """Return how many bytes can be read."""
    (size,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    return int(size)
