# SPDX-License-Identifier: Apache-2.0
"""Fills the memory of a tree that CRIU restores with ``--lazy-pages``, from a store.

The fill takes the place of CRIU's own lazy-pages daemon (criu: uffd.c). CRIU connects to
``lazy-pages.socket`` in its directory and hands over a userfaultfd for each process. Threads of the
library copy the pages in (fill.h) while CRIU goes on with the restore. Then CRIU waits in its hook,
and the tree is not let go before all pages are in place. If the agent ends before that, the kernel
closes the userfaultfds. Pages that are missing would then read as zeros, so such a tree must not
run.
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
"""At most this many threads copy pages."""

_TICK_MS = 100


@dataclass(frozen=True)
class PagesFilled:
    """What a fill has done so far."""

    phase: int
    bytes: int
    """The bytes that are in place so far, without those in ``preplaced``."""
    total: int
    """The bytes of all pages in the table that are not zero."""
    processes: int
    preplaced: int
    """The bytes that the prefill had put in place."""
    why: str


class FillEngine:
    """The fill for one attempt to restore from ``images``. The store must have its table. Each
    attempt needs its own FillEngine, and it must exist before CRIU starts."""

    def __init__(
        self,
        images: Path,
        store: MemoryStore,
        threads: int | None = None,
        *,
        plan: mmap.mmap | None = None,
        free_after_copy: bool = False,
    ) -> None:
        """``threads``: how many threads copy; None: one for each core that may be used, at most 8;
        0: only pages that the tree asks for are copied. ``plan``: the plan of an early CRIU
        (prefill.py); pages that it has placed are not copied. ``free_after_copy``: the store frees
        the pages that are in place (MemoryStore.free_after_copy).
        """
        self._ffi, self._calls = store_library.load()
        self._fill = self._ffi.NULL
        self._held = ExitStack()
        with ExitStack() as undo:
            opened = undo.enter_context(store.in_use())  # held as long as the library reads it
            if free_after_copy or store.frees_after_copy:
                store.free_after_copy()
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

    def wait(self, until: float) -> PagesFilled:
        """Return once every page of the table is in its place. CRIU must have restored the whole
        tree and wait in its hook. Raises StepFailed, also at ``until`` (monotonic seconds); then
        the caller must end the tree before :meth:`close`."""
        self._need_open()
        self._calls.fill_all_registered(self._fill)
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

    def seen(self) -> PagesFilled:
        """Return what the fill has done so far."""
        return self._report(0, 0)

    def close(self) -> None:
        """End the threads and close all descriptors. A second call is allowed."""
        fill, self._fill = self._fill, self._ffi.NULL
        if fill:
            self._calls.fill_stop(fill)
            self._plan = self._ffi.NULL  # it may be unmapped
            self._held.close()

    def _need_open(self) -> None:
        if not self._fill:
            raise StepFailed("restore", "the fill of memory was ended")

    def _report(self, phase: int, wait_ms: int) -> PagesFilled:
        self._need_open()
        report = self._ffi.new("struct fill_report *")
        self._calls.fill_wait(self._fill, phase, wait_ms, report)
        return PagesFilled(
            report.phase,
            report.filled * PAGE,
            report.total * PAGE,
            report.processes,
            report.preplaced * PAGE,
            self._ffi.string(report.why).decode("utf-8", "replace"),
        )


def _listen(images: Path) -> int:
    """Make the socket that CRIU connects to. Raises StepFailed."""
    try:
        (images / SOCKET).unlink(missing_ok=True)
        directory = os.open(images, os.O_PATH | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                # This path is short, also if the directory's own path is too long for a socket.
                listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
                listener.listen(1)
                listener.setblocking(False)
                return listener.detach()
        finally:
            os.close(directory)
    except OSError as error:
        raise StepFailed("restore", f"{images / SOCKET} cannot be made: {error}") from error
