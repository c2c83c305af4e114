# SPDX-License-Identifier: Apache-2.0
"""A store that gives pages away in advance, and what has become of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_parts import (
    PAGE,
    ZEROS,
    Pages,
    packed,
    runs_of,
)

from liveshift.criu_glue.memory.store import store_library
from liveshift.criu_glue.memory.store.store import (
    PAGES_FILE,
    MemoryStore,
    ProcessTable,
)

BLOCK_PAGES = 512
SLOT_ZERO, SLOT_FIRST = 1, 3  # prefill.h
COMING, IDLE, AT_LAST = range(3)  # cold.h


class Ahead:
    """Copies in advance what the store says is cold, as an early CRIU has it done."""

    def __init__(self, store: MemoryStore, directory: Path) -> None:
        self.store = store
        self.copied: dict[tuple[int, int], Pages] = {}  # by pid and incarnation
        self._pages = directory / PAGES_FILE
        self._ffi, self._calls = store_library.load()

    def choose(self, when: int = IDLE) -> list[Any]:
        """What there is to be copied now."""
        search = self._ffi.new("struct cold_cursor *")
        chosen: list[Any] = []
        with self.store.in_use() as store:
            while True:
                block = self._ffi.new("struct block *")
                if not self._calls.store_next_cold(store, search, when, block):
                    return chosen
                chosen.append(block)

    def copy(self, blocks: list[Any]) -> None:
        with self._pages.open("rb") as file:
            for block in blocks:
                to = self.copied.setdefault((block.pid, block.incarnation), {})
                for n, slot in enumerate(block.slot):
                    if block.fresh or slot == SLOT_ZERO:
                        to[block.address + n * PAGE] = ZEROS
                    if slot >= SLOT_FIRST:
                        file.seek((slot - SLOT_FIRST) * PAGE)
                        to[block.address + n * PAGE] = file.read(PAGE)

    def run(self) -> None:
        self.copy(self.choose())

    def move(self, blocks: list[Any]) -> None:
        """These were copied, and there is no memory for them twice."""
        with self.store.in_use() as store:
            for block in blocks:
                self._calls.store_evict(store, block.pid, block.incarnation, block.address)

    def let_go(self, pid: int) -> None:
        """Of what is outdated, what takes memory."""
        with self.store.in_use() as store:
            for at in self._dropped(self._calls.store_list_outdated, store, pid, 1):
                self.copied[pid, 1].pop(at)

    def kept(self) -> dict[int, Pages]:
        """What the store itself has of the images, right or not."""
        found: dict[int, Pages] = {}
        count = self._ffi.new("uint32_t *")
        with self.store.in_use() as store, self._pages.open("rb") as file:
            images = self._calls.store_images(store, count)
            for image in (images[i] for i in range(count[0])):
                for extent in (image.extent[i] for i in range(image.extents)):
                    for n in range(extent.pages):
                        data = ZEROS
                        if extent.slot >= SLOT_FIRST:
                            file.seek((extent.slot + n - SLOT_FIRST) * PAGE)
                            data = file.read(PAGE)
                        found.setdefault(image.pid, {})[extent.address + n * PAGE] = data
        return found

    def settle(self, pid: int, incarnation: int = 1) -> Pages:
        """The table is known: what was copied and counts."""
        kept = dict(self.copied.get((pid, incarnation), {}))
        with self.store.in_use() as store:
            for at in self._dropped(self._calls.store_apply_table, store, pid):
                kept.pop(at, None)
        return kept

    def unplanned(self, pid: int, plan: bytes) -> set[int]:
        """The plan is known, too: what does not count any more."""
        with self.store.in_use() as store:
            raw = self._ffi.from_buffer("uint8_t[]", plan)
            return set(self._dropped(self._calls.store_apply_plan, store, raw, pid))

    def placed(self) -> int:
        """Pages that count."""
        with self.store.in_use() as store:
            return int(self._calls.store_preplaced(store))

    def _dropped(self, call: Callable[..., int], *of: Any) -> list[int]:
        drops = self._ffi.new("struct discards *")
        assert call(*of, 0, 1 << 47, drops) == 0
        listed = [drops.list[n] for n in range(drops.used)]
        found = [drop.address + k * PAGE for drop in listed for k in range(drop.pages)]
        self._calls.free(drops.list)
        return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore.create(tmp_path, 64 << 20)
    yield made
    made.close()


def end(store: MemoryStore, model: dict[int, Pages]) -> None:
    store.end({pid: ProcessTable(1, packed(runs_of(pages))) for pid, pages in model.items()})
