# SPDX-License-Identifier: Apache-2.0
"""Ends a tree whose memory is still being filled, should the agent that fills it end.

The kernel closes what a process held, and what was not filled of the tree's memory would then read
as zeros: wrong numbers, of which nobody would know. So where a tree may run before it is all there
a process stands by. It has the tree's userfaultfds open as well (fill.h), by which whoever needs a
page that is missing goes on waiting; and it hears of the agent's end, and kills the room.
"""

from __future__ import annotations

import os
import socket
import subprocess

STAND_BY = """
read done && exit 0
[ -e /proc/self/fd/"$1"/stat ] && kill -9 "$2"
"""
"""Of the room's process 1 a directory of /proc is open, which is empty once that has ended: another
process of the same pid is not killed."""


class Keeper:
    """Stands by until it is told that all is well."""

    def __init__(self, init: int) -> None:
        """``init``: the room's process 1. Raises OSError when it has ended."""
        self.vault, theirs = socket.socketpair()
        """Descriptors sent into it stay open while the keeper lives."""
        try:
            about = os.open(f"/proc/{init}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", STAND_BY, "liveshift-keeper", str(about), str(init)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(about, theirs.fileno()),
                    cwd="/",
                    start_new_session=True,  # what ends the agent is not to end it, too
                )
            finally:
                os.close(about)
        except BaseException:
            self.vault.close()
            raise
        finally:
            theirs.close()

    def dismiss(self) -> None:
        """All is well, or the tree has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"done\n")
            self._process.stdin.close()
        except BrokenPipeError:  # somebody has killed it
            pass
        self._process.wait()
        self.vault.close()
