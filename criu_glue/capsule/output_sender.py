# SPDX-License-Identifier: Apache-2.0
"""Sends a capsule's log to another host while the log grows.

Each segment is a separate stream, named ``output:`` and the name of the segment's file. Sent bytes
stay valid: capsule-init truncates only partial records, and we read nothing behind ``Written.end``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from . import output
from .sandboxes import Sandbox

Send = Callable[[str, bytes], None]

BLOCK = 1 << 20
"""The sender reads at most this many bytes of the log at a time."""


class OutputSender:
    """Passes a log to ``send(stream, bytes)``; empty bytes end a stream. Not thread-safe."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._log = sandbox.plan.log
        self._file: BinaryIO | None = None  # the segment that is being sent
        self._begins = 0
        self._at = 0  # the offset up to which the log was sent
        self._ended = -1  # where the last segment that was sent whole begins; it may be empty

    def send_new(self, send: Send) -> None:
        """Send what was written since the last call; raises LiveshiftError if the sandbox has
        ended, or what ``send`` raises."""
        more = True
        while more:
            begins = output.segments(self._log)
            if self._file is None and not self._open(begins):
                return
            more = any(start > self._begins for start in begins)  # if so, this one no longer grows
            self._send_segment(send, last=not more)

    def finish(self, send: Send) -> None:
        """Send the rest; the capsule's tasks must be frozen. An empty segment stands for lost bytes
        at the end of the log."""
        self.send_new(send)
        self._end_segment(send)
        end = output.written(self._sandbox).end
        if self._at < end < output.UNKNOWN:
            send(_stream(end), b"")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, begins: list[int]) -> bool:
        """Open the first segment that was not sent; return False if there is none."""
        for start in begins:
            if start >= self._at and start > self._ended and not self._in_vain(start, begins[-1]):
                with contextlib.suppress(FileNotFoundError):  # rotated away just now
                    self._file = output.segment(self._log, start).open("rb")
                    self._begins = self._at = start
                    return True
        return False

    def _in_vain(self, start: int, last: int) -> bool:
        """Whether a rewind has begun this segment, and nothing was printed until the next one. A
        job may be rewound for weeks, and would get a file for each time."""
        if start == last or start % output.REWIND:
            return False
        try:
            return output.segment(self._log, start).stat().st_size == 0
        except FileNotFoundError:  # rotated away just now
            return True

    def _send_segment(self, send: Send, last: bool) -> None:
        assert self._file is not None
        # The order matters: if process 1 reports UNKNOWN after the size was read, it had written
        # nothing by then, so the size contains no partial record.
        size = os.fstat(self._file.fileno()).st_size
        until = min(self._begins + size, output.written(self._sandbox).end)
        self._file.seek(self._at - self._begins)
        while self._at < until and (data := self._file.read(min(BLOCK, until - self._at))):
            send(_stream(self._begins), data)
            self._at += len(data)
        if not last:
            self._end_segment(send)

    def _end_segment(self, send: Send) -> None:
        if self._file is not None:
            send(_stream(self._begins), b"")
            self._ended = self._begins
            self.close()


def _stream(begins: int) -> str:
    return f"output:{begins:020}"
