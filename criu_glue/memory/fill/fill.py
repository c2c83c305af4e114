# SPDX-License-Identifier: Apache-2.0
"""Gives a tree that CRIU restores with ``--lazy-pages`` its memory, from a store.

It stands where CRIU's own lazy-pages daemon would (criu: uffd.c): CRIU connects to
``lazy-pages.socket`` in its directory and hands a userfaultfd over for each process. Threads of
the library fill them (fill.h) while CRIU goes on restoring, and when it waits in its hook the tree
is not let go before all is there. What this process holds when it ends is let go by the kernel:
memory that was not filled would read as zeros, so such a tree must not run.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .... import cores, units
from ....errors import StepFailed
from ..engine import PAGE
from ..store import store_library
from ..store.store import MemoryStore

SOCKET = "lazy-pages.socket"

WAITS, RUNS, FILLED, FINISHED, FAILED = range(5)

FILLERS = 8
"""Threads that copy, at most."""

_TICK_MS = 100


@dataclass(frozen=True)
class Filled:
    """What a fill has done so far: bytes that were copied of all that there are; page faults that
    were served, of them with zeros; pages that were there already; processes; other events; bytes
    that were in place before CRIU began, which are not among those that were copied."""

    phase: int
    bytes: int
    total: int
    faults: int
    zeros: int
    present: int
    processes: int
    events: int
    placed: int
    why: str


class FillEngine:
    """One attempt at a restore in ``images``, from a store that has its table. A fresh one is
    needed for each attempt, and must be there before CRIU starts."""

    def __init__(
        self, images: Path, store: MemoryStore, threads: int | None = None, *,
        plan: mmap.mmap | None = None, spend: bool = False,
    ) -> None:  # fmt: skip
        """``threads``: one for each core that may be used, at most 8, when None; with 0 of them
        there comes only what the tree asks for. ``plan``: of a CRIU that was started early
        (prefill.py); what it has placed is not filled. ``spend``: the store gives its memory back
        as it is put in place (MemoryStore.spend).
        """
        self._ffi, self._calls = store_library.load()
        self._fill = self._ffi.NULL
        self._held = ExitStack()
        with ExitStack() as undo:
            opened = undo.enter_context(store.in_use())  # as long as the library reads it
            if spend or store.spent:
                store.spend()
            listener = _listen(images)
            why = self._ffi.new("char[]", store_library.WHY)
            if threads is None:
                threads = cores.threads(FILLERS)
            self._plan = self._ffi.NULL if plan is None else self._ffi.from_buffer("char[]", plan)
            self._fill = self._calls.fill_start(opened, listener, threads, self._plan, why)
            if not self._fill:
                said = self._ffi.string(why).decode("utf-8", "replace")
                raise StepFailed("restore", f"memory cannot be filled: {said}")
            self._held = undo.pop_all()

    def wait(self, until: float) -> Filled:
        """Return once every page of the table is in its place; CRIU must have restored all of the
        tree and wait in its hook. Raises StepFailed, also at ``until`` (monotonic seconds); then
        the tree must be ended before :meth:`close`."""
        self._need_open()
        self._calls.fill_settle(self._fill)
        while True:
            left = max(0.0, until - time.monotonic()) * 1000
            report = self._report(FILLED, math.ceil(min(left, _TICK_MS)))
            if report.phase == FAILED:
                raise StepFailed("restore", f"memory could not be filled: {report.why}")
            if report.phase >= FILLED:
                return report
            if not left:
                raise StepFailed(
                    "restore",
                    f"{units.size(report.bytes)} of {units.size(report.total)} of memory were"
                    f" filled in time, in {report.processes} processes",
                )

    def seen(self) -> Filled:
        """What it has done so far."""
        return self._report(0, 0)

    def close(self) -> None:
        """Let go of everything. May be called again."""
        fill, self._fill = self._fill, self._ffi.NULL
        if fill:
            self._calls.fill_stop(fill)
            self._plan = self._ffi.NULL  # it may be unmapped
            self._held.close()

    def _need_open(self) -> None:
        if not self._fill:
            raise StepFailed("restore", "the fill of memory was ended")

    def _report(self, phase: int, wait_ms: int) -> Filled:
        self._need_open()
        report = self._ffi.new("struct fill_report *")
        self._calls.fill_wait(self._fill, phase, wait_ms, report)
        return Filled(
            report.phase, report.filled * PAGE, report.total * PAGE, report.faults, report.zeros,
            report.present, report.processes, report.events, report.placed * PAGE,
            self._ffi.string(report.why).decode("utf-8", "replace"),
        )  # fmt: skip


def _listen(images: Path) -> int:
    """The socket that CRIU will look for; raises StepFailed."""
    try:
        (images / SOCKET).unlink(missing_ok=True)
        directory = os.open(images, os.O_PATH | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")  # however long its path is
                listener.listen(1)
                listener.setblocking(False)
                return listener.detach()
        finally:
            os.close(directory)
    except OSError as error:
        raise StepFailed("restore", f"{images / SOCKET} cannot be made: {error}") from error
