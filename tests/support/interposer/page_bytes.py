# SPDX-License-Identifier: Apache-2.0
"""The bytes of pages, made up for tests."""

from __future__ import annotations

from liveshift.interposer import layout

COUNTED = {b"gloo.allreduce": 7, b"gloo.barrier": 2}


def page_bytes(
    *,
    magic: bytes = layout.MAGIC,
    number: int = layout.LAYOUT,
    kinds: int = len(COUNTED),
    pid: int = 1234,
    clocks: tuple[tuple[int, int], ...] = ((7, 6), (2, 2)),
) -> bytes:
    """A page with two counters, and clocks of (announced, returned), without communicators."""
    raw = bytearray(layout.ALLOCATIONS_AT)
    layout.IDENTITY.struct.pack_into(
        raw, 0, magic, number, kinds, pid, 3, 8, -1, 10, b"9.9.9", b"py\x1b[2Jthon"
    )
    layout.TABLES.struct.pack_into(raw, layout.TABLES_AT, len(clocks), 0, 0, 0, 0)
    for i, (kind, count) in enumerate(COUNTED.items()):
        layout.COUNTER.struct.pack_into(
            raw, layout.COUNTERS_AT + i * layout.COUNTER.size, kind, count
        )
    for i, (announced, returned) in enumerate(clocks):
        layout.CLOCK.struct.pack_into(
            raw,
            layout.CLOCKS_AT + i * layout.CLOCK.size,
            i + 1,
            announced,
            returned,
            0,
            0,
            0,
            -1,
            -1,
            pid,
            0,
            1,
        )
    return bytes(raw)
