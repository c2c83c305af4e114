# SPDX-License-Identifier: Apache-2.0
"""The look at whether memory was put in its right place, before a restored tree runs."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest
from cold_pages import BLOCK_PAGES, Ahead, end, store
from memory_parts import PAGE, chunks, page

from liveshift.criu_glue.memory.store import store_library
from liveshift.criu_glue.memory.store.store import MemoryStore
from liveshift.errors import StepFailed

__all__ = ["store"]

_THREAD = 3968  # where in each page the kernel keeps what it says to a thread
_RSEQ = struct.Struct("<IIQIIII")  # cpu_id_start, cpu_id, rseq_cs, flags, node_id, mm_cid, unused


class InPlace:
    """A block of this process's own memory, which the store has put where it belongs."""

    def __init__(self, store: MemoryStore, directory: Path) -> None:
        size = BLOCK_PAGES * PAGE
        self._store = store
        self._memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._ffi, self._calls = store_library.load()
        first = int(self._ffi.cast("uintptr_t", self._ffi.from_buffer(self._memory)))
        self._begin = -first % size
        pages = {}
        for n in range(BLOCK_PAGES):
            at = self._begin + n * PAGE
            self._memory[at : at + PAGE] = page(n)
            _RSEQ.pack_into(self._memory, at + _THREAD, 0, 0, 0x7F0000001000, 0, 0, 0, 0)
            pages[first + at] = self._memory[at : at + PAGE]
        for each in chunks(7, pages):
            store.write(each)
        ahead = Ahead(store, directory)
        ahead.run()
        end(store, {7: pages})
        assert ahead.settle(7) == pages
        head = struct.pack("<IIII", 0x4C50534C, 1, 1, 0)
        process = struct.pack("<IIIIQQ", 7, 0, 1, 0, 0, 0)
        mapping = struct.pack("<QQQII", first + self._begin, size, 1 << 30, 0, 1)
        self._plan = self._ffi.from_buffer("uint8_t[]", head + process + mapping)

    def write(self, at: int, data: bytes) -> None:
        """Into every page."""
        for n in range(BLOCK_PAGES):
            place = self._begin + n * PAGE + at
            self._memory[place : place + len(data)] = data

    def check(self) -> None:
        why = self._ffi.new("char[]", store_library.WHY)
        with self._store.in_use() as opened:
            if self._calls.store_verify_preplaced(opened, self._plan, 7, os.getpid(), why) != 0:
                raise StepFailed("restore", self._ffi.string(why).decode())


def test_a_thread_that_went_on_elsewhere_is_not_another_page(
    store: MemoryStore, tmp_path: Path
) -> None:
    """The kernel writes a thread's processor into its memory, also while CRIU's own code runs."""
    there = InPlace(store, tmp_path)
    there.check()
    last = os.sysconf("SC_NPROCESSORS_CONF") - 1
    there.write(_THREAD, _RSEQ.pack(last, last, 0, 0, 0, last, 0))
    there.check()


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (_THREAD, _RSEQ.pack(0, 1, 0, 0, 0, 0, 0)),
        (_THREAD, _RSEQ.pack(1 << 20, 1 << 20, 0, 0, 0, 0, 0)),
        (_THREAD, _RSEQ.pack(0, 0, 0x7F0000002000, 0, 0, 0, 0)),
        (_THREAD, _RSEQ.pack(0, 0, 0, 0, 0, 0, 1)),
        (_THREAD - 8, bytes(32)),
        (0, b"other"),
        (PAGE - 1, b"\xff"),
    ],
)
def test_another_page_is_seen(store: MemoryStore, tmp_path: Path, at: int, data: bytes) -> None:
    there = InPlace(store, tmp_path)
    there.write(at, data)
    with pytest.raises(StepFailed, match="another page was placed"):
        there.check()
