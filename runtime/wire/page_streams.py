# SPDX-License-Identifier: Apache-2.0
"""What has come on the lanes for memory, in the manifest's terms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import xxhash

from ...errors import StepFailed
from .header import MEMORY


class PageStreams:
    """Passes chunks on to the store of memory and keeps the sums of each stream ``memory:k``.

    ``store`` is called as ``store(chunk)``, for chunks of several lanes by several threads;
    ``wants`` says which pages it has not found, as (inner pid, address, pages).
    """

    def __init__(
        self, store: Callable[[memoryview], None],
        wants: Callable[[], Iterable[tuple[int, int, int]]] = tuple,
    ) -> None:  # fmt: skip
        self._store = store
        self._wants = wants
        self._bytes: dict[int, int] = {}
        self._hashes: dict[int, xxhash.xxh3_64] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def write(self, lane: int, data: memoryview, tag: bytes) -> None:
        """One chunk in its lane's order, with the tag of its seal; empty data ends the
        stream. Raises StepFailed for more after that, and whatever ``store`` raises."""
        with self._lock:
            if lane in self._ended:
                raise StepFailed("ship", f"more came for {_name(lane)} after its end")
        if data:
            self._store(data)
        with self._lock:  # what is not stored yet does not count: the manifest is held against it
            self._bytes[lane] = self._bytes.get(lane, 0) + len(data)
            self._hashes.setdefault(lane, xxhash.xxh3_64()).update(tag)
            if not data:
                self._ended.add(lane)

    def wants(self) -> Iterable[tuple[int, int, int]]:
        """Which pages were only named and are not here."""
        return self._wants()

    def not_ended(self) -> list[str]:
        with self._lock:
            return [_name(lane) for lane in sorted(self._bytes.keys() - self._ended)]

    def streams(self) -> dict[str, tuple[int, int]]:
        """As Lanes.end says it at the source: name → (bytes, xxh3-64 of the chunks' tags)."""
        with self._lock:
            return {
                _name(lane): (size, self._hashes[lane].intdigest())
                for lane, size in sorted(self._bytes.items())
            }


def _name(lane: int) -> str:
    return f"{MEMORY}:{lane}"
