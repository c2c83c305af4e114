# SPDX-License-Identifier: Apache-2.0
"""What no input may do: take long, take much memory, or reach outside the working directory."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

SLOWEST_S = 2.0
"""Of processor time for one input; the slowest honest one takes 20 ms."""

LONGEST_S = 60.0
"""For one input on a machine that others use too: what waits for ever is found by this."""

MEMORY = 512 << 20
"""Bytes of address space beyond what the harness has taken when the first input comes."""

Run = Callable[[bytes], None]


class TooSlow(BaseException):
    """An input held its parser up. Not an Exception: no parser may take it for one of its own."""


class Escape(AssertionError):
    """Something was made, changed or removed outside the working directory."""


def limit_memory() -> None:
    """From here on an allocation far beyond the inputs' size fails with MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def timed(run: Run) -> Run:
    """Raises TooSlow in the middle of what takes too long, or behind what could not be stopped."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"more than {SLOWEST_S:g} s of work, or {LONGEST_S:g} s in all")

    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGPROF, late)

    def guarded(data: bytes) -> None:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SLOWEST_S)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        try:
            run(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if time.process_time() - began > SLOWEST_S:
            late(0, None)

    return guarded


class Place:
    """A directory in memory: ``inside`` is for the parser, all beside it must stay as it is."""

    def __init__(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="place-"))
        self.top.chmod(0o711)
        self.inside = self.top / "inside"
        self.fresh()
        (self.top / "beside").mkdir()
        (self.top / "beside" / "file").write_bytes(b"kept")
        (self.top / "beside" / "link").symlink_to("file")
        self._before = self._look()

    def fresh(self) -> Path:
        """Empty the parser's directory and return it."""
        if self.inside.exists():
            if not any(self.inside.iterdir()):
                return self.inside
            shutil.rmtree(self.inside)
        self.inside.mkdir(mode=0o755)
        return self.inside

    def check(self) -> None:
        if self._look() != self._before:
            raise Escape(f"outside of its directory: {self._before} became {self._look()}")

    def remove(self) -> None:
        shutil.rmtree(self.top, ignore_errors=True)

    def _look(self) -> list[tuple[object, ...]]:
        beside = self.top / "beside"
        paths = [beside, *sorted(beside.iterdir())]
        seen = [(str(p), *_stamp(os.lstat(p))) for p in paths]
        return [*seen, tuple(sorted(os.listdir(self.top)))]


def _stamp(s: os.stat_result) -> tuple[int, ...]:
    return s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_size, s.st_mtime_ns, s.st_ctime_ns
