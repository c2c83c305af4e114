# SPDX-License-Identifier: Apache-2.0
"""Reads the lines that a child process writes to a pipe, each with a deadline: the child may hang
in the driver."""

from __future__ import annotations

import os
import time

from ..waiting import readable


class Lines:
    """The lines of a pipe. The caller keeps the descriptor open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._read = descriptor, b""

    def next(self, within_s: float) -> str | None:
        """The next line with its line end; None if it does not come in so many seconds. At the end
        of the pipe: what came after the last line end, mostly ""."""
        until = time.monotonic() + within_s
        while b"\n" not in self._read:
            if not readable(until - time.monotonic(), self._descriptor):
                return None
            part = os.read(self._descriptor, 65536)
            if not part:
                break
            self._read += part
        line, end, self._read = self._read.partition(b"\n")
        return (line + end).decode(errors="replace")
