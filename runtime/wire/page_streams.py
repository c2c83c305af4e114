# SPDX-License-Identifier: Apache-2.0
"""Sums up what has come on the lanes for memory, so that it can be compared with the manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import xxhash

from ...errors import StepFailed
from .header import MEMORY


def _no_device(process: int, at: int, chunk: memoryview) -> None:
    """Where an image has no device memory: raises StepFailed."""
    raise StepFailed("ship", f"device memory of process {process} came unannounced")


class PageStreams:
    """Passes chunks on to the store of memory and keeps the sums of each stream ``memory:k``.

    Threads call ``store(chunk)`` for pages, and ``store_device(process, at, chunk)`` for device
    memory, several at once for chunks of different lanes. ``wants`` returns the pages that were
    named but are not here, as (inner pid, address, pages).
    """

    def __init__(
        self,
        store: Callable[[memoryview], None],
        wants: Callable[[], Iterable[tuple[int, int, int]]] = tuple,
        store_device: Callable[[int, int, memoryview], None] = _no_device,
    ) -> None:
        self._store, self._store_device = store, store_device
        self.wants = wants
        self._bytes: dict[int, int] = {}
        self._hashes: dict[int, xxhash.xxh3_64] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def write(self, lane: int, data: memoryview, tag: bytes) -> None:
        """Store one chunk of pages, in the order of its lane; empty data ends the stream. ``tag``:
        the tag of its seal. Raises StepFailed for data after the end, and the errors of
        ``store``."""
        self._take(lane, data, tag, lambda: self._store(data))

    def write_device(self, lane: int, process: int, at: int, data: memoryview, tag: bytes) -> None:
        """Store one chunk of device memory, which is not empty; otherwise as :meth:`write`."""
        if not data:
            raise StepFailed("ship", f"an empty chunk of device memory of process {process} came")
        self._take(lane, data, tag, lambda: self._store_device(process, at, data))

    def _take(self, lane: int, data: memoryview, tag: bytes, store: Callable[[], None]) -> None:
        with self._lock:
            if lane in self._ended:
                raise StepFailed("ship", f"more came for {_name(lane)} after its end")
        if data:
            store()
        with self._lock:  # after store(): a chunk that is not stored must not count
            self._bytes[lane] = self._bytes.get(lane, 0) + len(data)
            self._hashes.setdefault(lane, xxhash.xxh3_64()).update(tag)
            if not data:
                self._ended.add(lane)

    def not_ended(self) -> list[str]:
        with self._lock:
            return [_name(lane) for lane in sorted(self._bytes.keys() - self._ended)]

    def streams(self) -> dict[str, tuple[int, int]]:
        """The sums, in the form of Lanes.end at the source: name → (bytes, xxh3-64 of the tags)."""
        with self._lock:
            return {
                _name(lane): (size, self._hashes[lane].intdigest())
                for lane, size in sorted(self._bytes.items())
            }


def _name(lane: int) -> str:
    return f"{MEMORY}:{lane}"
