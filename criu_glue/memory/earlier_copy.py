# SPDX-License-Identifier: Apache-2.0
"""What was in a tree's memory when it left this host; see earlier_copy.c, which holds it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from importlib.resources import files

from ...errors import StepFailed
from ...waiting import readable
from .maps import own_ranges

PATIENCE_S, RATE = 5.0, 500e6
"""It takes so long at most, and for each so many bytes a second more."""


class EarlierCopy:
    """That of one tree. Ends with :meth:`close`, with this process, or when memory gets short."""

    def __init__(self, pids: Iterable[int], limit: int) -> None:
        """Copy what is in their memory, as far as such memory travels apart from images, zero pages
        apart; the processes stand still. At most ``limit`` bytes of it; what cannot be read is left
        out.

        Raises StepFailed, FileNotFoundError or ProcessLookupError with nothing left behind.
        """
        lines = [
            f"{pid} {start:x} {end:x}\n" for pid in pids for start, end in own_ranges(pid, False)
        ]
        program = str(files(__package__) / "earlier-copy")
        with os.fdopen(os.memfd_create("ranges"), "r+") as ranges:
            ranges.writelines(lines)
            ranges.seek(0)
            self._process = subprocess.Popen(
                [program, str(limit), str(ranges.fileno())], pass_fds=[ranges.fileno()],
                text=True, cwd="/", env={},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        self.bytes = 0
        try:
            self.bytes = self._told(PATIENCE_S + limit / RATE)
        except BaseException:
            self.close()
            raise

    def _told(self, seconds: float) -> int:
        """The bytes that it says to have."""
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None
        assert errors is not None
        if not readable(seconds, out.fileno()):
            raise StepFailed("finish", f"no copy of its memory was made within {seconds:.0f} s")
        said = out.readline()
        if not said:
            why = errors.read().strip()
            raise StepFailed("finish", f"no copy of its memory was kept: {why}")
        return int(said)

    @property
    def pid(self) -> int:
        """Of the process that holds it; it may have ended."""
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let go of it. May be called again."""
        self._process.kill()
        with self._process:  # closes the pipes, waits for its end
            pass
