# SPDX-License-Identifier: Apache-2.0
"""Generations that a store keeps: what they consist of, what memory they take."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generations import LIMIT, Memory, keep, kept, pages, place, store, taken, write
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
    content,
    digest,
    packed,
    page,
    reference,
    runs_of,
    table,
)

from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.criu_glue.memory.store.store import PAGES_FILE, ProcessTable
from liveshift.errors import StepFailed

__all__ = ["place", "store"]


def test_what_is_written_later_changes_no_generation(store: HeldStore) -> None:
    first: Memory = {7: pages(0, 300) | {BASE + 400 * PAGE: ZEROS}, 8: pages(500, 3)}
    write(store, first)
    keep(store, 1, first)
    assert kept(store, 1) == first
    second: Memory = {7: first[7] | pages(1000, 100) | {BASE + 200 * PAGE: ZEROS}, 8: first[8]}
    write(store, {7: pages(1000, 100)})
    store.write(chunk(7, [(BASE + 200 * PAGE, 1, ZERO)]))
    assert kept(store, 1) == first
    keep(store, 2, second)
    assert store.kept == [1, 2]
    assert (kept(store, 1), kept(store, 2)) == (first, second)
    with store.view(2) as view:
        assert view.size == 304 * PAGE
        assert view.table == table(second)
        assert view.incarnations() == {7: 1, 8: 1}
    store.write(chunk(7, [(BASE, 1, DATA)], page(7), incarnation=2))  # the first one ends
    assert (kept(store, 1), kept(store, 2)) == (first, second)


def test_pages_that_come_again_as_they_were_take_no_memory(store: HeldStore, place: Path) -> None:
    """Also from an agent that was restarted, and counts incarnations from the start."""
    memory: Memory = {7: pages(0, 500), 8: pages(600, 200)}
    write(store, memory, incarnation=3)
    keep(store, 1, memory, incarnation=3)
    assert taken(place) == 700
    store.revert(1)
    write(store, memory, incarnation=1)
    assert taken(place) == 700
    likes = [reference(data, 7, address) for address, data in pages(0, 200).items()]
    store.write(chunk(9, [(BASE, 200, REFERENCE)], b"".join(likes)))
    memory[9] = pages(0, 200)
    keep(store, 2, memory, incarnation=1)
    assert taken(place) == 700
    store.drop(1)
    assert taken(place) == 700
    assert kept(store, 2) == memory


def test_what_only_a_dropped_generation_had_goes_back_to_the_host(
    store: HeldStore, place: Path
) -> None:
    first: Memory = {7: pages(0, 400)}
    write(store, first)
    keep(store, 1, first)
    write(store, {7: pages(1000, 100)})
    assert taken(place) == 500
    second: Memory = {7: first[7] | pages(1000, 100)}
    keep(store, 2, second)
    store.drop(1)
    store.drop(1)
    assert (store.kept, taken(place)) == ([2], 400)
    store.drop(2)
    assert taken(place) == 400, "the processes still have these pages"
    store.revert(0)
    assert taken(place) == 0


def test_fifty_generations_take_no_more_memory_than_two(store: HeldStore, place: Path) -> None:
    """Memory that the job gives back and gets elsewhere is forgotten as well."""
    chance = random.Random(1)
    its = pages(0, 600)
    for number in range(1, 51):
        if number > 1:
            store.revert(number - 1)
        assert taken(place) == (600 if number > 1 else 0)
        for gone in chance.sample(sorted(its), 30):
            del its[gone]
        fresh = chance.sample([n for n in range(2000) if BASE + n * PAGE not in its], 30)
        written = chance.sample(sorted(its), 100) if number > 1 else sorted(its)
        came = {at: page(number * 5000 + at // PAGE % 5000) for at in written}
        came |= {BASE + n * PAGE: page(number * 5000 + n) for n in fresh}
        write(store, {7: came})
        its |= came
        keep(store, number, {7: its})
        assert taken(place) <= 600 + 130
        store.drop(number - 1)
    assert kept(store, 50) == {7: its}
    store.revert(50)
    assert taken(place) == 600


def test_a_generation_is_read_while_the_next_one_comes(store: HeldStore) -> None:
    first: Memory = {pid: pages(pid * 5000, 700) for pid in (7, 8)}
    last: Memory = {pid: pages(pid * 9000, 700) for pid in (7, 8)}
    write(store, first)
    keep(store, 1, first)
    failed: list[BaseException] = []
    read: list[Memory] = []

    def lane(pid: int) -> None:
        for n in range(3):
            write(store, {pid: pages(n * 1000, 700)})
        write(store, {pid: last[pid]})

    def reader() -> None:
        for _ in range(3):
            read.append(kept(store, 1))
            with store.view(1) as view:
                assert view.digest() == digest(first)

    def run(work: Callable[..., None], *words: int) -> None:
        try:
            work(*words)
        except BaseException as error:
            failed.append(error)

    works: list[tuple[Any, ...]] = [(lane, 7), (lane, 8), (reader,), (reader,)]
    threads = [threading.Thread(target=run, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert read == [first] * 6
    keep(store, 2, last)
    assert (kept(store, 1), kept(store, 2)) == (first, last)


def test_a_dropped_generation_stays_for_those_that_read_it(store: HeldStore, place: Path) -> None:
    made: list[Memory] = [{7: pages(n * 1000, 200)} for n in range(4)]
    write(store, made[1])
    keep(store, 1, made[1])
    with store.view(1) as view:
        store.drop(1)
        assert store.kept == []
        with pytest.raises(StepFailed, match=r"has no generation 1; it keeps none"):
            kept(store, 1)
        write(store, made[2])
        keep(store, 2, made[2])
        write(store, made[3])
        store.end(table(made[3]))
        with pytest.raises(StepFailed, match=r"generation 3 has no place beside .* readers"):
            store.keep(3, digest(made[3]))
        assert content(view) == made[1]
        assert taken(place) == 600
    assert taken(place) == 400
    store.keep(3, digest(made[3]))
    assert (kept(store, 2), kept(store, 3)) == (made[2], made[3])


def test_what_has_come_for_a_freeze_that_failed_is_forgotten(store: HeldStore, place: Path) -> None:
    first: Memory = {7: pages(0, 300), 8: pages(400, 10)}
    write(store, first)
    keep(store, 1, first)
    write(store, {7: pages(1000, 400), 9: pages(3000, 50)})
    store.write(chunk(9, [(BASE + 99 * PAGE, 1, REFERENCE)], reference(page(1), 7, BASE)))
    assert store.wants() != []
    with pytest.raises(StepFailed, match="sent more than the"):
        write(store, {10: pages(0, LIMIT // PAGE)})
    with pytest.raises(StepFailed, match="an earlier write to the store of pages has failed"):
        store.write(chunk(7, [(BASE, 1, ZERO)]))
    store.revert(1)
    assert (taken(place), store.wants()) == (310, [])
    with pytest.raises(StepFailed, match="no complete table"):
        store.keep(2, digest(first))
    with pytest.raises(StepFailed, match="process 9: 1 pages have not come"):
        store.end({9: ProcessTable(1, packed([(BASE, 1)]))})
    write(store, {7: pages(1000, 1)})
    second: Memory = {7: first[7] | pages(1000, 1), 8: first[8]}
    keep(store, 2, second)
    assert (kept(store, 1), kept(store, 2), taken(place)) == (first, second, 311)


_OTHERS: dict[str, Callable[[Pages], Memory]] = {
    "another byte": lambda its: {7: its | {BASE: page(0)[:-1] + b"x"}},
    "one page more": lambda its: {7: its | {BASE + 50 * PAGE: page(50)}},
    "a page of zeros more": lambda its: {7: its | {BASE + 50 * PAGE: ZEROS}},
    "one page less": lambda its: {7: {at: its[at] for at in sorted(its)[1:]}},
    "two pages exchanged": lambda its: {7: its | {BASE: page(1), BASE + PAGE: page(0)}},
    "another process": lambda its: {8: its},
    "nothing": lambda its: {},
}


@pytest.mark.parametrize("other", _OTHERS)
def test_memory_that_differs_from_the_source_is_not_kept(
    store: HeldStore, place: Path, other: str
) -> None:
    its = pages(0, 40) | {BASE + 60 * PAGE: ZEROS}
    write(store, {7: its})
    store.end(table({7: its}))
    with pytest.raises(StepFailed, match="generation 5 is not what its source has sent") as failed:
        store.keep(5, digest(_OTHERS[other](its)))
    assert failed.value.hint is not None
    assert (store.kept, [path.name for path in place.iterdir()]) == ([], [PAGES_FILE])
    store.revert(0)
    write(store, {7: its})
    keep(store, 5, {7: its})
    assert kept(store, 5) == {7: its}


def test_neither_order_nor_place_changes_a_digest(store: HeldStore) -> None:
    memory: Memory = {pid: pages(pid, 20) for pid in (7, 8, 9)}
    turned = {pid: memory[pid] for pid in (9, 7, 8)}
    for pid in turned:
        for at in reversed(sorted(memory[pid])):
            write(store, {pid: {at: memory[pid][at]}})
    store.end(table(turned))
    store.keep(1, digest(memory))
    store.end({})
    store.keep(2, bytes(16))
    assert (kept(store, 1), kept(store, 2)) == (memory, {})


def test_what_cannot_be_is_refused_in_words(store: HeldStore, tmp_path: Path) -> None:
    memory: Memory = {7: pages(0, 5)}
    with pytest.raises(StepFailed, match="generation 1 has no complete table"):
        store.keep(1, digest({}))
    write(store, memory)
    with pytest.raises(StepFailed, match="1 pages have not come"):
        store.end(table({7: memory[7] | {BASE + 9 * PAGE: ZEROS}}))
    with pytest.raises(StepFailed, match="generation 1 has no complete table"):
        store.keep(1, digest(memory))
    store.end(table(memory))
    with pytest.raises(StepFailed, match="under the number 0: numbers begin at 1"):
        store.keep(0, digest(memory))
    store.keep(1, digest(memory))
    store.end(table(memory))
    with pytest.raises(StepFailed, match="under the number 1: there is one already"):
        store.keep(1, digest(memory))
    store.keep(2, digest(memory))
    store.end(table(memory))
    with pytest.raises(StepFailed, match="generation 3 has no place beside"):
        store.keep(3, digest(memory))
    with pytest.raises(StepFailed, match="has no generation 3; it keeps 1, 2"):
        kept(store, 3)
    with pytest.raises(StepFailed, match="generation 3 is not kept"):
        store.revert(3)
    with pytest.raises(StepFailed, match="cannot be used up"):
        store.free_after_copy()
    assert kept(store, 1) == kept(store, 2) == memory
    said = "2147483648 pages of memory were announced, but a store has room for 1431650302"
    with pytest.raises(StepFailed, match=said):
        HeldStore.create(tmp_path, 1 << 43)


def test_a_table_that_later_pages_have_overtaken_is_not_kept(store: HeldStore) -> None:
    memory: Memory = {7: pages(0, 5)}
    write(store, memory)
    store.end(table(memory))
    store.write(chunk(7, [(BASE, 1, DATA)], page(9), incarnation=2))
    with pytest.raises(StepFailed, match=f"the page at {BASE:#x} has come again since its table"):
        store.keep(1, digest(memory))
    assert store.kept == []


def test_any_number_of_pages_may_lie_in_one_slot(place: Path) -> None:
    """More than 16 bits can count, and each generation counts them once more."""
    each, parts, same = 17_000, 4, page(1)
    store = HeldStore.create(place, (each * parts + 1) * PAGE)
    memory: Memory = {7: {BASE: same}, 8: {BASE + n * PAGE: same for n in range(each * parts)}}
    write(store, {7: memory[7]})
    like = reference(same, 7, BASE) * each
    for n in range(parts):
        store.write(chunk(8, [(BASE + n * each * PAGE, each, REFERENCE)], like))
    assert taken(place) == 1
    keep(store, 1, memory)
    store.write(chunk(7, [(BASE, 1, DATA)], page(2)))
    store.write(chunk(8, [(BASE, 1, DATA)], page(3)))
    second: Memory = {7: {BASE: page(2)}, 8: memory[8] | {BASE: page(3)}}
    keep(store, 2, second)
    assert taken(place) == 3
    store.close()
    store = HeldStore.load(place)
    for number, expected in ((1, memory), (2, second)):
        with store.view(number) as view:
            assert view.digest() == digest(expected)
    store.drop(2)
    assert taken(place) == 3, "the processes have it"
    store.revert(1)
    assert taken(place) == 1
    store.revert(0)
    assert taken(place) == 1
    store.drop(1)
    assert taken(place) == 0
    store.close()


_RUNS = st.lists(
    st.tuples(
        st.sampled_from([7, 8]),
        st.integers(0, 100),
        st.integers(1, 30),
        st.sampled_from([DATA, DATA, ZERO, REFERENCE]),
    ),
    max_size=6,
)
_FREEZES = st.lists(
    st.tuples(
        _RUNS,
        st.integers(1, 3),  # the incarnation, as the source counts now
        st.integers(0, 60),  # pages before this one were unmapped
        st.sampled_from(["kept", "kept", "failed", "restarted"]),
        st.booleans(),  # whether the generation before is dropped early
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(_FREEZES)
def test_it_does_as_a_dictionary_for_each_generation_would(freezes: list[Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        store = HeldStore.create(Path(place), 4 << 20)
        # By generation: the incarnations, and the memory.
        known: dict[int, tuple[dict[int, int], Memory]] = {0: ({}, {})}
        newest = serial = 0
        for number, (runs, incarnation, unmapped, end, early) in enumerate(freezes, 1):
            store.revert(newest)
            incarnations = dict(known[newest][0])
            memory = {pid: dict(its) for pid, its in known[newest][1].items()}
            for pid, first, count, kind in runs:
                places = range(BASE + first * PAGE, BASE + (first + count) * PAGE, PAGE)
                fresh = dict.fromkeys(places, ZEROS)
                payload = b""
                if kind == REFERENCE:
                    fresh = {at: d for at in places if (d := memory.get(15 - pid, {}).get(at))}
                    payload = b"".join(reference(d, 15 - pid, at) for at, d in fresh.items())
                elif kind == DATA:
                    serial += count
                    fresh = {at: page(serial + n) for n, at in enumerate(places)}
                    payload = b"".join(fresh.values())
                where = [(*run, kind) for run in runs_of(fresh)]
                store.write(chunk(pid, where, payload, incarnation))
                incarnations[pid] = incarnation
                memory.setdefault(pid, {}).update(fresh)
            assert store.wants() == []
            start = BASE + unmapped * PAGE
            memory = {
                pid: {at: its[at] for at in its if at >= start} for pid, its in memory.items()
            }
            if early and len(store.kept) > 1:
                store.drop(store.kept[0])
            if end == "kept":
                tables = {pid: packed(runs_of(its)) for pid, its in memory.items()}
                store.end({pid: ProcessTable(incarnations[pid], tables[pid]) for pid in tables})
                if len(store.kept) > 1:
                    store.drop(store.kept[0])
                store.keep(number, digest(memory))
                known[number] = (incarnations, memory)
                newest = number
            elif end == "restarted" and newest:
                store.close()
                store = HeldStore.load(Path(place))
            for each in store.kept:
                assert kept(store, each) == {pid: its for pid, its in known[each][1].items() if its}
        assert (newest in store.kept) == (newest > 0)
        store.close()
