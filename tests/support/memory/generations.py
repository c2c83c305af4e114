# SPDX-License-Identifier: Apache-2.0
"""Stores that keep generations, with a few processes' pages in them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from memory_parts import BASE, PAGE, Pages, chunks, content, digest, page, table

from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.criu_glue.memory.store.store import PAGES_FILE

Memory = dict[int, Pages]
LIMIT = 16 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a tmpfs, where each page of a file takes 4 KiB and no more."""
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def store(place: Path) -> Iterator[HeldStore]:
    made = HeldStore.create(place, LIMIT)
    yield made
    made.close()


def taken(place: Path) -> int:
    """How many pages of memory the store's file takes."""
    return (place / PAGES_FILE).stat().st_blocks * 512 // PAGE


def pages(first: int, count: int, at: int = 0) -> Pages:
    """``count`` different pages from page ``at`` on."""
    return {BASE + (at + n) * PAGE: page(first + n) for n in range(count)}


def write(store: HeldStore, memory: Mapping[int, Pages], incarnation: int = 1) -> None:
    for pid, its in memory.items():
        for each in chunks(pid, its, incarnation):
            store.write(each)


def keep(store: HeldStore, number: int, memory: Memory, incarnation: int = 1) -> None:
    """Keep what has come so far, which is ``memory``."""
    store.end(table(memory, incarnation))
    store.keep(number, digest(memory))


def kept(store: HeldStore, number: int) -> Memory:
    with store.view(number) as view:
        return content(view)
