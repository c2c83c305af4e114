# SPDX-License-Identifier: Apache-2.0
"""A holder lends a generation to a restore on its own host: the same pages, none of which change or
go before they are given back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_parts import BASE, PAGE, Pages, chunks, content, digest, page, table

from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.criu_glue.memory.store.lent_store import LentStore
from liveshift.criu_glue.memory.store.store import MemoryStore
from liveshift.errors import StepFailed

COUNT = 500
FIRST: dict[int, Pages] = {7: {BASE + n * PAGE: page(n) for n in range(COUNT)}}
SECOND: dict[int, Pages] = {7: {BASE + n * PAGE: page(9000 + n) for n in range(COUNT)}}


class Lender:
    """A holder with a capsule's memory, and the directory of a restore beside it."""

    def __init__(self, top: Path) -> None:
        self.directory, self.target = top / "held", top / "r1.0"
        self.directory.mkdir()
        self.target.mkdir()
        self.store = HeldStore.create(self.directory, 4 * COUNT * PAGE)
        self.keep(1, FIRST)

    def keep(self, number: int, memory: dict[int, Pages]) -> None:
        for pid, pages in memory.items():
            for chunk in chunks(pid, pages):
                self.store.write(chunk)
        self.store.end(table(memory))
        self.store.keep(number, digest(memory))

    def taken(self) -> int:
        """Bytes of memory that the pages take."""
        return (self.directory / "memory").stat().st_blocks * 512


@pytest.fixture
def lender() -> Iterator[Lender]:
    with tempfile.TemporaryDirectory(prefix="ls-lent-", dir="/dev/shm") as place:
        made = Lender(Path(place))
        yield made
        made.store.close()


def test_it_is_the_generation_and_takes_no_memory(lender: Lender) -> None:
    before = lender.taken()
    lent = LentStore.borrow(lender.store, 1, lender.target)
    assert content(lent) == FIRST
    assert lent.size == COUNT * PAGE
    assert lender.taken() == before > COUNT * PAGE // 2
    with pytest.raises(StepFailed, match="takes no more pages"):
        lent.write(next(iter(chunks(7, SECOND[7]))))
    lent.close()


def test_it_stays_while_a_further_generation_comes_and_its_own_is_dropped(lender: Lender) -> None:
    lent = LentStore.borrow(lender.store, 1, lender.target)
    lender.keep(2, SECOND)
    lender.store.drop(1)
    assert content(lent) == FIRST
    both = lender.taken()
    lent.close()
    assert lender.taken() <= both - COUNT * PAGE, "it was dropped as soon as it was given back"
    with lender.store.view(2) as view:
        assert content(view) == SECOND


def test_it_stays_when_the_holder_is_removed(lender: Lender) -> None:
    lent = LentStore.borrow(lender.store, 1, lender.target)
    lender.store.close()
    for path in lender.directory.iterdir():
        path.unlink()
    assert content(lent) == FIRST
    lent.close()


def test_a_restore_that_would_use_the_pages_up_is_refused(lender: Lender) -> None:
    lent = LentStore.borrow(lender.store, 1, lender.target)
    assert lent.lent
    with pytest.raises(StepFailed, match="lent by a holder"):
        lent.free_after_copy()
    assert content(lent) == FIRST
    lent.close()


def test_a_restarted_agent_finds_it_and_knows_that_it_is_lent(lender: Lender) -> None:
    LentStore.borrow(lender.store, 1, lender.target).close()
    found = MemoryStore.load(lender.target)
    assert content(found) == FIRST
    assert found.lent
    found.close()
    os.unlink(lender.target / "memory")
    with lender.store.view(1) as view:
        assert content(view) == FIRST


def test_a_generation_that_was_lent_is_not_dropped_by_a_restarted_agent(lender: Lender) -> None:
    """It knows of no reader; the second name of the file says that there may be one."""
    LentStore.borrow(lender.store, 1, lender.target).close()
    lender.keep(2, SECOND)
    lender.store.close()
    lender.store = HeldStore.load(lender.directory)
    lent = MemoryStore.load(lender.target)
    lender.store.drop(1)
    assert content(lent) == FIRST
    lent.close()
    (lender.target / "memory").unlink()
    before = lender.taken()
    lender.store.drop(1)
    assert lender.taken() <= before - COUNT * PAGE
    assert lender.store.kept == [2]


def test_lending_does_not_cut_the_file_of_a_holder_with_an_odd_limit(lender: Lender) -> None:
    lender.store.close()
    for path in lender.directory.iterdir():
        path.unlink()
    lender.store = HeldStore.create(lender.directory, 4 * COUNT * PAGE + 1)
    lender.keep(1, FIRST)
    size = (lender.directory / "memory").stat().st_size
    LentStore.borrow(lender.store, 1, lender.target).close()
    assert (lender.directory / "memory").stat().st_size == size


def test_a_store_of_its_own_is_not_lent(tmp_path: Path) -> None:
    store = MemoryStore.create(tmp_path, COUNT * PAGE)
    assert not store.lent
    store.close()


def test_what_is_not_kept_is_not_lent(lender: Lender) -> None:
    with pytest.raises(StepFailed, match="has no generation 3"):
        LentStore.borrow(lender.store, 3, lender.target)
    assert list(lender.target.iterdir()) == []


def test_another_file_system_is_refused_in_words(lender: Lender, tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="cannot be lent"):
        LentStore.borrow(lender.store, 1, tmp_path)
    lender.keep(2, SECOND)
    lender.store.drop(1)
    assert lender.store.kept == [2]
