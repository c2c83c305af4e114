# SPDX-License-Identifier: Apache-2.0
"""What a store has of an image, page by page, and the digest of such pages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

import xxhash
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


def page_digest(memory: Mapping[int, Mapping[int, bytes]]) -> bytes:
    """The digest of these pages as digest.h has it: inner pid: address: content."""
    low = high = 0
    for inner, pages in memory.items():
        for address, content in pages.items():
            seen = xxhash.xxh3_128_intdigest(content)
            halves = seen & (1 << 64) - 1, seen >> 64
            mix = xxhash.xxh3_128_intdigest(struct.pack("<QQQQ", inner, address, *halves))
            low, high = low + mix, high + (mix >> 64)
    return struct.pack("<QQ", low & (1 << 64) - 1, high & (1 << 64) - 1)
