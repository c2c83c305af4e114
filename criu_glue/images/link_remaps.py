# SPDX-License-Identifier: Apache-2.0
"""The names that CRIU gives, for the time of a dump, to files that have lost their own.

A task may have a file open, or mapped, whose name is gone while the file has another: a POSIX named
semaphore is always such (sem_open(3) of glibc makes it under a passing name). With ``--link-remap``
CRIU gives it a second name beside the one that is gone, ``link_remap.<n>`` (criu: files-reg.c,
create_link_remap), which travels like any other file, and restores from it. CRIU takes these names
away: at the source when it lets go of the tree, at the destination once the tree is restored.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..capsule.room import PRIVATE, Room
from ..files import below

NAME = re.compile(r"link_remap\.[0-9]{1,10}")


def clear(room: Room) -> None:
    """Take away what a CRIU that was killed has left in a capsule's own directories: the next dump
    would find the names taken. Other directories are not looked at: they may be others' too, whom
    CRIU dumps just now."""
    for private in PRIVATE:
        with contextlib.suppress(OSError):
            _clear(room.root / private.strip("/"))


def _clear(top: Path) -> None:
    with below.opened(top) as directory:
        for _, _, names, folder in os.fwalk(".", dir_fd=directory):
            for name in filter(NAME.fullmatch, names):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
