# SPDX-License-Identifier: Apache-2.0
"""Pages that the destination has before any comes: the source need only name them.

They lie in another capsule of the same job that runs here: a replica has much in common. The
destination offers their hashes; the source refers to donor 0 for a page whose hash was offered; the
store looks the page up here (``use``) and checks it. What is no longer there as it was is
``wanted`` from the source after all.

A hash that is offered says something about memory to whoever hears it: offer a source only what
belongs to the same job.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import StepFailed
from . import store_library
from .engine import PAGE
from .maps import own_ranges

_STEP = 64 << 20
_GONE = (FileNotFoundError, ProcessLookupError)


class Donors:
    """What was found at one time: filled by one thread, then offered and used, not changed."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes of memory to know of at most; each page takes 16 bytes."""
        self._ffi, self._calls = store_library.load()
        self._lock = threading.Lock()
        self._users = 0
        self._closed = self._settled = False
        self._donors = self._calls.donors_new(max(0, limit) // PAGE)
        if not self._donors:
            raise StepFailed("prepare", "out of memory for a list of pages")

    def add_process(self, pid: int, stopped: Callable[[], bool] = lambda: False) -> int:
        """What is now in the memory of a process of this host, as far as such memory travels apart
        from images; returns its bytes. The process is not held up. One that ends is no error.

        ``stopped``: whether it is not wanted any more.
        """
        taken = 0
        with self._filling() as donors, ExitStack() as files, contextlib.suppress(*_GONE):
            ends = []
            for name in ("mem", "pagemap"):
                ends.append(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC))
                files.callback(os.close, ends[-1])
            source = self._calls.donors_add_process(donors, ends[0])
            for start, end in own_ranges(pid, locked=False) if source >= 0 else ():
                for at in range(start, end, _STEP):
                    until = min(end, at + _STEP)
                    found = -1
                    if not stopped():
                        found = self._calls.donors_take(donors, source, ends[1], at, until)
                    if found < 0:
                        return taken * PAGE
                    taken += found
        return taken * PAGE

    def offer(self) -> bytes:
        """The lower 64 bits of the pages' hashes (XXH3-128), ordered, little endian."""
        with self.in_use() as donors:
            count = self._calls.donors_settle(donors)
            hashes = self._ffi.new("uint64_t[]", count + 1)
            self._calls.donors_offer(donors, hashes)
            return bytes(self._ffi.buffer(hashes, 8 * count))

    def fetch(self, likeness: int) -> bytes | None:
        """The page of that hash (XXH3-128), or None when it is not here any more."""
        with self.in_use() as donors:
            page = self._ffi.new("uint8_t[]", PAGE)
            halves = self._ffi.new("uint64_t[2]", [likeness & (1 << 64) - 1, likeness >> 64])
            found = self._calls.donors_fetch(donors, halves, page)
            return bytes(self._ffi.buffer(page)) if found else None

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """The C object, complete, and not closed meanwhile."""
        with self._lock:
            if self._closed:
                raise StepFailed("ship", "what this host has of the memory was let go of")
            if not self._settled:
                self._calls.donors_settle(self._donors)
                self._settled = True
            self._users += 1
        try:
            yield self._donors
        finally:
            with self._lock:
                self._users -= 1
                self._let_go()

    def close(self) -> None:
        """Let go of it, once nobody uses it any more. May be called again."""
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._closed and self._users == 0 and self._donors:
            self._calls.donors_free(self._donors)
            self._donors = self._ffi.NULL

    @contextmanager
    def _filling(self) -> Iterator[Any]:
        with self._lock:
            if self._settled or self._closed:
                raise RuntimeError("pages that were offered are not added to")
            yield self._donors
