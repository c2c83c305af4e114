# SPDX-License-Identifier: Apache-2.0
"""What the store gives away in advance: at the end it is right, or it is named as outdated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cold_pages import AT_LAST, BLOCK_PAGES, COMING, Ahead, end, store
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_parts import (
    BASE,
    DATA,
    PAGE,
    REFERENCE,
    ZERO,
    ZEROS,
    Pages,
    chunk,
    chunks,
    page,
    reference,
    runs_of,
)

from liveshift.criu_glue.memory import engine
from liveshift.criu_glue.memory.store import store_library
from liveshift.criu_glue.memory.store.store import (
    PAGES_FILE,
    MemoryStore,
)
from liveshift.errors import StepFailed

__all__ = ["store"]


SHARED = 240


def likes(pages: Pages, pid: int) -> bytes:
    return b"".join(reference(data, pid, at) for at, data in pages.items())


@pytest.fixture
def family(store: MemoryStore, tmp_path: Path) -> tuple[dict[int, Pages], Ahead]:
    """Two processes, SHARED pages of each in the same places of the store, copied in advance."""
    own = {BASE + n * PAGE: page(n) for n in range(BLOCK_PAGES)}
    other = {at: data if n < SHARED else page(9000 + n) for n, (at, data) in enumerate(own.items())}
    for each in chunks(7, own):
        store.write(each)
    taken = (tmp_path / PAGES_FILE).stat().st_blocks
    shares(store, 8, own, SHARED)
    assert (tmp_path / PAGES_FILE).stat().st_blocks == taken, "they share"
    for each in chunks(8, dict(list(other.items())[SHARED:])):
        store.write(each)
    ahead = Ahead(store, tmp_path)
    ahead.run()
    assert ahead.copied == {(7, 1): own, (8, 1): other}
    return {7: own, 8: other}, ahead


def shares(store: MemoryStore, pid: int, pages: Pages, count: int = BLOCK_PAGES) -> None:
    """The first pages of 7 are those of this process, too."""
    for first in range(0, count, 40):
        part = {at: pages[at] for at in list(pages)[first : min(count, first + 40)]}
        store.write(chunk(pid, [(*run, REFERENCE) for run in runs_of(part)], likes(part, 7)))
    assert store.wants() == []


def test_what_is_rewritten_is_outdated_and_no_other_that_shared_its_place(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    for n, (pid, at) in enumerate([(7, 3), (8, 5), (7, 9), (8, 9), (7, 9), (8, 130)]):
        model[pid][BASE + at * PAGE] = page(1000 + n)
        store.write(chunk(pid, [(BASE + at * PAGE, 1, DATA)], page(1000 + n), round_=1))
    end(store, model)
    for pid, written in ((7, {3, 9}), (8, {5, 9, 130})):
        untouched = {
            at: data for at, data in model[pid].items() if (at - BASE) // PAGE not in written
        }
        assert ahead.settle(pid) == untouched


@pytest.mark.parametrize("kind", [ZERO, REFERENCE])
def test_what_becomes_anything_else_is_outdated(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead], kind: int
) -> None:
    model, ahead = family
    at = BASE + 20 * PAGE
    payload = reference(model[8][BASE], 8, BASE) if kind == REFERENCE else b""
    store.write(chunk(7, [(at, 1, kind)], payload, round_=1))
    before = model[7].pop(at)
    kept = dict(model[7])
    model[7][at] = ZEROS if kind == ZERO else model[8][BASE]
    assert model[7].get(at) != before
    end(store, model)
    assert ahead.settle(7) == kept
    assert ahead.settle(8) == model[8]


def test_a_page_that_was_found_late_is_outdated(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    at, there = BASE + 20 * PAGE, BASE + 4 * BLOCK_PAGES * PAGE
    store.write(chunk(7, [(at, 1, REFERENCE)], reference(page(5000), 8, there), round_=1))
    ahead.run()
    store.write(chunk(8, [(there, 1, DATA)], page(5000), round_=1))
    assert store.wants() == []
    kept = {address: data for address, data in model[7].items() if address != at}
    model[7][at] = model[8][there] = page(5000)
    end(store, model)
    assert ahead.settle(7) == kept


def test_what_is_outdated_is_copied_again(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    for pid, at in ((7, 3), (8, 5)):
        model[pid][BASE + at * PAGE] = page(2000 + at)
        store.write(chunk(pid, [(BASE + at * PAGE, 1, DATA)], page(2000 + at), round_=1))
    ahead.run()
    end(store, model)
    assert {pid: ahead.settle(pid) for pid in model} == model


def test_what_is_hot_is_copied_again_at_last(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    for n in range(6):  # more often than it is tried while rounds come
        model[7][BASE] = page(2000 + n)
        store.write(chunk(7, [(BASE, 1, DATA)], page(2000 + n), round_=n + 1))
        ahead.run()
    assert ahead.copied[7, 1][BASE] != model[7][BASE], "it is hot"
    assert ahead.choose(COMING) == []
    (block,) = ahead.choose(AT_LAST)
    assert [n for n, slot in enumerate(block.slot) if slot] == [0]
    ahead.copy([block])
    assert ahead.choose(AT_LAST) == []
    end(store, model)
    assert {pid: ahead.settle(pid) for pid in model} == model


def test_at_last_nothing_is_copied_where_nothing_was(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    fresh = {BASE + n * PAGE: page(3000 + n) for n in range(BLOCK_PAGES, 2 * BLOCK_PAGES)}
    for each in chunks(7, fresh):
        store.write(each)
    for each in chunks(7, {at: page(at) for at in list(model[7])[:400]}):
        store.write(each)
    ahead.let_go(7)
    assert ahead.choose(AT_LAST) == [], "there its memory would have to be had first"
    assert {block.address for block in ahead.choose()} == {BASE, BASE + BLOCK_PAGES * PAGE}


def test_what_a_child_has_of_its_parent_is_copied_once(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    """CRIU takes it over from there."""
    model, ahead = family
    before = dict(ahead.copied)
    for pid, own in ((9, 0), (10, 300)):
        shares(store, pid, model[7])
        model[pid] = {**model[7], **{BASE + n * PAGE: page(6000 + n) for n in range(own)}}
        for each in chunks(pid, dict(list(model[pid].items())[:own])):
            store.write(each)
    for _ in range(2):
        ahead.run()
        assert ahead.copied == before | {(10, 1): model[10]}
    end(store, model)
    assert ahead.settle(9) == {}
    assert ahead.settle(10) == model[10]


def test_what_no_mapping_takes_along_does_not_count(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    """Of 8 there is nothing in the plan; of 7 all but what lies before or after its mapping."""
    model, ahead = family
    end(store, model)
    for pid in model:
        assert ahead.settle(pid) == model[pid]
    assert ahead.placed() == 2 * BLOCK_PAGES
    taken = range(3, BLOCK_PAGES - 70)
    head = struct.pack("<IIII", 0x4C50534C, 1, 2, 0)
    process = struct.pack("<IIIIQQ", 7, 0, 2, 0, 0, 0)
    start, size = BASE + taken.start * PAGE, len(taken) * PAGE
    mappings = struct.pack("<QQQII", BASE, 2 * PAGE, 0, 0, 0)
    mappings += struct.pack("<QQQII", start, size, 1 << 30, 0, 0)
    plan = head + process + mappings
    outside = {BASE + n * PAGE for n in range(BLOCK_PAGES) if n not in taken}
    assert ahead.unplanned(7, plan) == outside
    assert ahead.placed() == BLOCK_PAGES + len(taken)
    assert ahead.unplanned(8, plan) == set(model[8])
    assert ahead.placed() == len(taken)
    assert ahead.unplanned(7, plan) == set()


def test_only_what_the_table_has_counts(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead]
) -> None:
    model, ahead = family
    del model[8][BASE + 7 * PAGE]
    end(store, model)
    assert ahead.settle(8) == model[8]


def test_what_several_pages_lie_in_is_not_given_back_also_by_an_agent_started_anew(
    store: MemoryStore, family: tuple[dict[int, Pages], Ahead], tmp_path: Path
) -> None:
    model, ahead = family
    lone = BASE + 3 * PAGE
    model[7][lone] = page(5000)  # from now on pages of its own, of both
    store.write(chunk(7, [(lone, 1, DATA)], page(5000), round_=1))
    end(store, model)
    slots = {at: slot for at, slot in _slots(store, 8)}
    store.save()
    ffi, calls = engine.load(
        "struct store; void store_free(struct store *s, uint32_t slot, uint32_t pages);"
    )
    again = MemoryStore.load(tmp_path)
    for each in (store, again):
        held = (tmp_path / PAGES_FILE).stat().st_blocks * 512
        with each.in_use() as opened:
            pointer = ffi.cast(
                "struct store *", int(store_library.load()[0].cast("uintptr_t", opened))
            )
            calls.store_free(pointer, min(slots.values()), SHARED)
        freed = held - (tmp_path / PAGES_FILE).stat().st_blocks * 512
        assert freed <= PAGE, "but for the one that only one process has"
        assert ahead.kept()[8] == {**model[8], lone: ahead.kept()[8][lone]}
    again.close()


def _slots(store: MemoryStore, pid: int) -> Iterator[tuple[int, int]]:
    ffi, calls = store_library.load()
    count = ffi.new("uint32_t *")
    with store.in_use() as opened:
        images = calls.store_images(opened, count)
        for image in (images[i] for i in range(count[0]) if images[i].pid == pid):
            for extent in (image.extent[i] for i in range(image.extents)):
                yield from (
                    (extent.address + n * PAGE, extent.slot + n) for n in range(extent.pages)
                )


_STEPS = st.lists(
    st.tuples(
        st.sampled_from([7, 8]),
        st.sampled_from(
            [
                "copy",
                "choose",
                "last",
                "move",
                "let go",
                DATA,
                DATA,
                ZERO,
                REFERENCE,
                REFERENCE,
            ]
        ),
        st.integers(0, 60),
        st.integers(1, 40) | st.just(400),
    ),
    max_size=24,
)


@settings(max_examples=100, deadline=None)
@given(_STEPS)
def test_nothing_wrong_counts_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, Any, int, int]]
) -> None:
    """Also when it is read from the store only after more has come ("choose", then "copy")."""
    directory = tmp_path_factory.mktemp("cold")
    store = MemoryStore.create(directory, 64 << 20)
    ahead = Ahead(store, directory)
    model: dict[int, Pages] = {7: {}, 8: {}}
    number = BLOCK_PAGES
    for each in chunks(7, {BASE + n * PAGE: page(n) for n in range(BLOCK_PAGES)}):
        store.write(each)
    model[7] = {BASE + n * PAGE: page(n) for n in range(BLOCK_PAGES)}
    for at in range(0, BLOCK_PAGES, 64):
        part = {BASE + n * PAGE: page(n) for n in range(at, at + 64)}
        store.write(chunk(8, [(BASE + at * PAGE, 64, REFERENCE)], likes(part, 7)))
    model[8] = dict(model[7])
    chosen: list[Any] = []
    for pid, step, first, count in steps:
        if step in (DATA, REFERENCE):
            count = min(count, 40)  # as much as one chunk may bring
        places = [BASE + n * PAGE for n in range(first, first + count)]
        if step == "choose":
            chosen += ahead.choose()
        elif step == "last":
            chosen += ahead.choose(AT_LAST)
        elif step in ("copy", "move"):
            chosen += ahead.choose()
            ahead.copy(chosen)
            if step == "move":
                ahead.move(chosen)
            chosen = []
        elif step == "let go":
            ahead.copy(chosen)
            chosen = []
            ahead.let_go(pid)
        elif step == DATA:
            fresh = {place: page(number + n) for n, place in enumerate(places)}
            number += count
            store.write(chunk(pid, [(places[0], count, DATA)], b"".join(fresh.values())))
            model[pid].update(fresh)
        elif step == ZERO:
            store.write(chunk(pid, [(places[0], count, ZERO)]))
            model[pid].update(dict.fromkeys(places, ZEROS))
        else:  # the other's pages, at the same places
            other = {p: model[15 - pid][p] for p in places if p in model[15 - pid]}
            runs = [(*run, REFERENCE) for run in runs_of(other)]
            store.write(chunk(pid, runs, likes(other, 15 - pid)))
            model[pid].update(other)
    ahead.copy(chosen)
    for want in store.wants():  # their like was moved
        for at in range(want.address, want.address + want.pages * PAGE, PAGE):
            store.write(chunk(want.pid, [(at, 1, DATA)], model[want.pid][at]))
    assert store.wants() == []
    end(store, model)
    absent, kept = 0, ahead.kept()
    for pid, pages in model.items():
        placed = ahead.settle(pid)
        for at, data in placed.items():
            assert pages[at] == data, f"process {pid}, page {(at - BASE) // PAGE}"
        for at in pages.keys() - placed.keys():
            assert kept[pid][at] == pages[at], f"process {pid}, page {(at - BASE) // PAGE}"
        absent += sum(kept[pid][at] != pages[at] for at in pages)
    assert absent * PAGE == store.lost
    store.close()


def test_what_is_moved_takes_no_memory_of_the_store_and_comes_again_when_it_is_asked_for(
    store: MemoryStore, tmp_path: Path
) -> None:
    own = {BASE + n * PAGE: page(n) for n in range(BLOCK_PAGES)}
    for each in chunks(7, own):
        store.write(each)
    ahead = Ahead(store, tmp_path)
    blocks = ahead.choose()
    ahead.copy(blocks)
    own[BASE] = page(1000)  # written again between the copy and the move
    store.write(chunk(7, [(BASE, 1, DATA)], page(1000), round_=1))
    ahead.move(blocks)
    assert (tmp_path / PAGES_FILE).stat().st_blocks * 512 <= 16 * PAGE
    own[BASE + 9 * PAGE] = page(1001)  # and after it
    store.write(chunk(7, [(BASE + 9 * PAGE, 1, DATA)], page(1001), round_=1))
    part = {BASE + n * PAGE: own[BASE + n * PAGE] for n in range(64, 96)}
    store.write(chunk(8, [(*run, REFERENCE) for run in runs_of(part)], likes(part, 7)))
    asked = [(want.pid, want.address, want.pages) for want in store.wants()]
    assert asked == [(8, BASE + 65 * PAGE, 31)]  # of each 64 one stays
    with pytest.raises(StepFailed, match="have not come"):
        end(store, {7: own, 8: part})
    for at, data in part.items():
        store.write(chunk(8, [(at, 1, DATA)], data, round_=2))
    end(store, {7: own, 8: part})
    assert store.lost == (BLOCK_PAGES - 8 - 2) * PAGE
    ahead.move(blocks)  # too late: nothing more is moved
    assert store.lost == (BLOCK_PAGES - 8 - 2) * PAGE
    kept = ahead.kept()
    assert kept[8] == part
    assert ahead.settle(7) | {BASE: page(1000), BASE + 9 * PAGE: page(1001)} == own
    assert [kept[7][BASE + n * PAGE] == page(m) for n, m in ((0, 1000), (9, 1001))] == [True] * 2
    with pytest.raises(StepFailed, match="not whole"):
        store.forward(lambda chunk, release: release())
