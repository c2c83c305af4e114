# SPDX-License-Identifier: Apache-2.0
"""What a store has of an image, page by page."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from page_chunks import DATA, PAGE

from liveshift.criu_glue.memory.store.store import MemoryStore


def runs_of(chunk: memoryview) -> Iterator[tuple[int, int, int]]:
    """Address, pages and kind of each run."""
    (runs,) = struct.unpack_from("<I", chunk, 16)
    return struct.iter_unpack("<QII", chunk[20 : 20 + 16 * runs])


def stored(store: MemoryStore) -> dict[int, dict[int, bytes]]:
    """All pages of the store's image: inner pid: address: content."""
    found: dict[int, dict[int, bytes]] = {}

    def take(chunk: memoryview, release: Callable[[], None]) -> None:
        (inner,) = struct.unpack_from("<I", chunk, 4)
        of, at = found.setdefault(inner, {}), PAGE
        for address, pages, kind in runs_of(chunk):
            for here in range(address, address + pages * PAGE, PAGE):
                of[here] = bytes(chunk[at : at + PAGE]) if kind == DATA else bytes(PAGE)
                at += PAGE if kind == DATA else 0
        release()

    store.forward(take)
    return found
