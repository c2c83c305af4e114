# SPDX-License-Identifier: Apache-2.0
"""What comes of memory from another host: chunks of pages, tables, and what is kept of them.

An input is a conversation: frames with their lengths before them, chunks of pages or (all that does
not begin like one) a table.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash
from descriptors import no_descriptor_left

from fuzz.guard import Place
from liveshift.criu_glue.memory.engine import PAGE
from liveshift.criu_glue.memory.store import store_library
from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.criu_glue.memory.store.store import (
    INDEX_FILE,
    MemoryStore,
    read_table,
)
from liveshift.errors import StepFailed

LIMIT = 64 * PAGE
BASE = 0x7F00_0000_0000
_PAGE = bytes(range(256)) * 16


def conversations() -> list[bytes]:
    likeness = xxhash.xxh3_128_intdigest(_PAGE)
    same = struct.pack("<QQIQ", likeness & (1 << 64) - 1, likeness >> 64, 7, BASE)
    table = {7: (1, [(BASE, 1), (BASE + PAGE, 8)]), 8: (2, [(BASE, 2)])}
    said = [
        _chunk(7, 1, [(BASE, 1, 1), (BASE + PAGE, 8, 2)], _PAGE),
        _chunk(8, 2, [(BASE, 1, 3), (BASE + 9 * PAGE, 1, 3)], same + same[::-1]),
        _chunk(8, 2, [(BASE + PAGE, 1, 2), (BASE + 9 * PAGE, 3, 4)]),
        _chunk(8, 1, [(BASE, 1, 2)]),
        msgspec.msgpack.encode({p: {"incarnation": i, "runs": r} for p, (i, r) in table.items()}),
    ]
    packed = {9: {"incarnation": 0, "runs": struct.pack("<QQ", 1 << 40, 3)}}
    late = [_chunk(9, 0, [(1 << 40, 3, 2)]), msgspec.msgpack.encode(packed)]
    framed = [struct.pack("<I", len(raw)) + raw for raw in said + late]
    return [b"".join(framed), b"".join(framed[2:]), b"".join(framed[5:]), framed[1]]


def _chunk(
    pid: int, incarnation: int, runs: list[tuple[int, int, int]], payload: bytes = b""
) -> bytes:
    head = struct.pack("<4sIIII", b"LSM1", pid, incarnation, 0, len(runs))
    head += b"".join(struct.pack("<QII", *run) for run in runs)
    return head.ljust(PAGE, b"\0") + payload if payload else head


def _frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def conversation(place: Place) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        top = place.fresh()
        (top / "on").mkdir()
        with no_descriptor_left():
            store = MemoryStore.create(top, LIMIT)
            try:
                _converse(store, data, top / "on")
            finally:
                store.close()
        place.check()

    return run


def _converse(store: MemoryStore, data: bytes, on: Path) -> None:
    complete = False
    for frame in _frames(data):
        try:
            if frame.startswith(b"LSM1"):
                store.write(memoryview(frame))
                complete = False
            else:
                complete = False
                store.end(read_table(frame))
                complete = True
        except StepFailed:
            continue
        assert len(store.wants()) <= LIMIT // PAGE
    if complete:
        assert store.size <= LIMIT
        store.save()
        _passed_on(store, on)


def _passed_on(store: MemoryStore, on: Path) -> None:
    """The image can be sent on, and is the same there."""

    def digest(each: MemoryStore) -> list[tuple[bytes, bytes]]:
        found = []

        def take(raw: memoryview, free: Callable[[], None]) -> None:
            found.append((bytes(raw[:8]), bytes(raw)))
            free()

        each.forward(take)
        return found

    def write_on(raw: memoryview, free: Callable[[], None]) -> None:
        other.write(raw)
        free()

    other = MemoryStore.create(on, LIMIT)
    try:
        store.forward(write_on)
        other.end(store.table)
        assert digest(other) == digest(store)
    finally:
        other.close()


def indexes() -> list[bytes]:
    head = struct.pack("<8sQI4x", b"LSMI\0\0\0\1", LIMIT, 2)
    one = struct.pack("<III4x", 7, 1, 2) + struct.pack("<QIIQII", BASE, 1, 3, BASE + PAGE, 8, 1)
    return [head + one + struct.pack("<III4x", 8, 1, 0), head, head[:10]]


def index(place: Place) -> Callable[[bytes], None]:
    """What an agent that was started anew finds."""

    def run(data: bytes) -> None:
        top = place.fresh()
        (top / INDEX_FILE).write_bytes(data)
        (top / "memory").write_bytes(_PAGE)
        with no_descriptor_left():
            try:
                store = MemoryStore.load(top)
            except StepFailed:
                return
            at = 0

            def sink(raw: memoryview, free: Callable[[], None]) -> None:
                nonlocal at
                at += 1
                free()
                if at > 20:
                    raise EOFError

            try:
                store.forward(sink)
            except EOFError:
                pass
            finally:
                store.close()
        place.check()

    return run


def generation_indexes() -> list[bytes]:
    head = struct.pack("<8sQQI4x", b"LSMG\0\0\0\1", LIMIT, 7, 2)
    one = struct.pack("<III4x", 7, 1, 2) + struct.pack("<QIIQII", BASE, 1, 4, BASE + PAGE, 8, 1)
    return [head + one + struct.pack("<III4x", 8, 1, 0), head, head[:10]]


def generation_index(place: Place) -> Callable[[bytes], None]:
    """What a restarted holder finds: it can be read, and the next generation comes."""

    def run(data: bytes) -> None:
        top = place.fresh()
        (top / f"{INDEX_FILE}.7").write_bytes(data)
        (top / "memory").write_bytes(_PAGE + _PAGE)
        with no_descriptor_left():
            try:
                store = HeldStore.load(top)
            except StepFailed:
                return
            try:
                with store.view(7) as view:
                    assert view.size < store.limit + PAGE
                    size, kept = view.size, view.digest()
                with contextlib.suppress(StepFailed):  # its limit may be too small
                    store.write(_chunk(7, 1, [(BASE, 1, 1)], _PAGE[::-1]))
                with store.view(7) as view:
                    assert (view.size, view.digest()) == (size, kept)
                store.drop(7)
            finally:
                store.close()
        place.check()

    return run


def pagemap(data: bytes) -> None:
    """Of an image's page ranges the marks are taken away in place, and but once."""
    ffi, calls = store_library.load()
    raw = bytearray(data)
    done = calls.pagemap_clear_lazy(ffi.from_buffer("uint8_t[]", raw), len(raw))
    assert done in (0, -1)
    assert all(a == b or a & ~2 == b for a, b in zip(data, raw, strict=True))
    if done == 0:
        again = bytearray(raw)
        assert calls.pagemap_clear_lazy(ffi.from_buffer("uint8_t[]", again), len(again)) == 0
        assert again == raw
