# SPDX-License-Identifier: Apache-2.0
"""What was in a tree's memory when it left this host; see earlier_copy.c, which holds it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from importlib.resources import files

from ...errors import StepFailed
from .maps import own_ranges


class EarlierCopy:
    """That of one tree. Ends with :meth:`close`, with this process, or when memory gets short."""

    def __init__(self, pids: Iterable[int], limit: int) -> None:
        """Copy what is in their memory, as far as such memory travels apart from images; the
        processes stand still. Takes as much memory, zero pages apart: ``limit`` bytes at most.

        Raises StepFailed, FileNotFoundError or ProcessLookupError with nothing left behind.
        """
        lines = [
            f"{pid} {start:x} {end:x}\n" for pid in pids for start, end in own_ranges(pid, False)
        ]
        program = str(files(__package__) / "earlier-copy")
        self._process = subprocess.Popen(
            [program, str(limit)], text=True, cwd="/", env={},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.bytes = 0
        try:
            self.bytes = self._hand_over("".join(lines) + "\n")
        except BaseException:
            self.close()
            raise

    def _hand_over(self, ranges: str) -> int:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(ranges)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why
        said = process.stdout.readline()
        if not said:
            raise StepFailed("finish", f"no copy was kept: {process.stderr.read().strip()}")
        return int(said)

    @property
    def pid(self) -> int:
        """Of the process that holds it; it may have ended."""
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Let go of it. May be called again."""
        self._process.kill()  # at its first word it would free the same memory, only later
        with self._process:  # closes the pipes, waits for its end
            pass
