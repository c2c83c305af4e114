# SPDX-License-Identifier: Apache-2.0
"""The store of pages at the destination: what comes, what is missing, what is refused."""

from __future__ import annotations

import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
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
    content,
    keep,
    packed,
    page,
    reference,
    runs_of,
    table,
)

from liveshift.criu_glue.memory.store.store import (
    MemoryStore,
    ProcessTable,
    WantedPages,
    read_table,
)
from liveshift.errors import StepFailed
from liveshift.runtime.wire import CHUNK


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    made = MemoryStore.create(tmp_path, 4 << 20)
    yield made
    made.close()


def test_what_came_is_what_there_is_however_often_it_came(store: MemoryStore) -> None:
    store.write(
        chunk(7, [(BASE, 3, DATA), (BASE + 9 * PAGE, 2, ZERO)], page(1) + page(2) + page(3))
    )
    store.write(chunk(7, [(BASE + PAGE, 1, DATA)], page(4), round_=1))
    store.write(chunk(7, [(BASE + 9 * PAGE, 1, DATA), (BASE + 2 * PAGE, 1, ZERO)], page(5)))
    store.write(chunk(8, [(BASE, 1, DATA)], page(6)))
    store.end(
        {
            7: ProcessTable(1, packed([(BASE, 3), (BASE + 9 * PAGE, 2)])),
            8: ProcessTable(1, struct.pack("<QQ", BASE, 1)),
        }
    )
    assert content(store) == {
        7: {
            BASE: page(1),
            BASE + PAGE: page(4),
            BASE + 2 * PAGE: ZEROS,
            BASE + 9 * PAGE: page(5),
            BASE + 10 * PAGE: ZEROS,
        },
        8: {BASE: page(6)},
    }
    assert store.size == 6 * PAGE


def test_only_what_the_table_has_exists(store: MemoryStore) -> None:
    store.write(chunk(7, [(BASE, 3, DATA)], page(1) + page(2) + page(3)))
    store.end({7: ProcessTable(1, packed([(BASE + PAGE, 1)]))})
    assert content(store) == {7: {BASE + PAGE: page(2)}}


def test_what_is_missing_is_named_and_may_come_after_all(store: MemoryStore) -> None:
    store.write(chunk(7, [(BASE, 1, DATA)], page(1)))
    wanted = {7: ProcessTable(1, packed([(BASE, 1), (BASE + 5 * PAGE, 3)]))}
    said = rf"process 7: 3 pages have not come, the first of them at {BASE + 5 * PAGE:#x}"
    with pytest.raises(StepFailed, match=said):
        store.end(wanted)
    with pytest.raises(StepFailed, match="process 9: 1 pages have not come"):
        store.end({9: ProcessTable(1, packed([(BASE, 1)]))})
    store.write(chunk(7, [(BASE + 5 * PAGE, 3, ZERO)]))
    store.end(wanted)


def test_a_process_that_became_another_is_forgotten(store: MemoryStore) -> None:
    store.write(chunk(7, [(BASE, 2, DATA)], page(1) + page(2), incarnation=1))
    store.write(chunk(7, [(BASE, 1, DATA)], page(3), incarnation=2))
    store.write(chunk(7, [(BASE + PAGE, 1, DATA)], page(4), incarnation=1))  # late
    with pytest.raises(StepFailed, match=r"1 pages have not come, the first .* 0x7f0000001000"):
        store.end({7: ProcessTable(2, packed([(BASE, 2)]))})
    with pytest.raises(StepFailed, match="2 pages have not come"):
        store.end({7: ProcessTable(1, packed([(BASE, 2)]))})
    store.end({7: ProcessTable(2, packed([(BASE, 1)]))})
    assert content(store) == {7: {BASE: page(3)}}


def test_a_reference_may_come_before_what_it_means(store: MemoryStore) -> None:
    store.write(chunk(8, [(BASE, 1, REFERENCE)], reference(page(1), 7, BASE)))
    store.write(chunk(7, [(BASE, 1, DATA)], page(1)))
    store.end({8: ProcessTable(1, packed([(BASE, 1)]))})
    assert content(store) == {8: {BASE: page(1)}}


def test_a_page_that_is_wanted_again_is_what_was_said_of_it_last(store: MemoryStore) -> None:
    """What it was to be before has come since, and is there: it is not that any more."""
    at, old, new = BASE, page(1), page(2)
    like, unknown = BASE + 8 * PAGE, BASE + 9 * PAGE
    store.write(chunk(7, [(at, 1, REFERENCE)], reference(old, 8, like)))
    store.write(chunk(7, [(at, 1, DATA)], old))
    store.write(chunk(7, [(at, 1, REFERENCE)], reference(new, 8, unknown), round_=1))
    store.write(chunk(8, [(like, 1, DATA)], old, round_=1))
    assert store.wants() == [WantedPages(7, at, 1)]
    store.write(chunk(8, [(unknown, 1, DATA)], new, round_=1))
    assert store.wants() == []
    store.end(table({7: {at: new}, 8: {like: old, unknown: new}}))
    assert content(store) == {7: {at: new}, 8: {like: old, unknown: new}}


def test_more_than_was_announced_is_refused(tmp_path: Path) -> None:
    store = MemoryStore.create(tmp_path, 4 * PAGE)
    store.write(chunk(7, [(BASE, 3, DATA)], page(1) * 3))
    store.write(chunk(7, [(BASE, 3, DATA)], page(2) * 3))
    with pytest.raises(StepFailed, match="process 8 sent more than the 16384 bytes announced"):
        store.write(chunk(8, [(BASE, 2, DATA)], page(1) * 2))
    store.close()
    store = MemoryStore.create(tmp_path, 4 * PAGE)
    with pytest.raises(StepFailed, match="1048576 pages in one chunk, but 4 were announced"):
        store.write(chunk(7, [(BASE, 1 << 20, ZERO)]))
    store.close()


def test_equal_pages_are_copied_here_if_they_are_equal(store: MemoryStore) -> None:
    store.write(chunk(7, [(BASE, 2, DATA), (BASE + 8 * PAGE, 1, ZERO)], page(1) + page(2)))
    likes = [reference(page(1), 7, BASE), reference(ZEROS, 7, BASE + 8 * PAGE)]
    likes += [reference(page(9), 7, BASE + PAGE), reference(page(3), 7, BASE + 2 * PAGE)]
    store.write(chunk(8, [(BASE, 4, REFERENCE)], b"".join(likes)))
    assert store.wants() == [WantedPages(8, BASE + 2 * PAGE, 2)]
    with pytest.raises(StepFailed, match="process 8: 2 pages have not come"):
        store.end({8: ProcessTable(1, packed([(BASE, 4)]))})
    store.write(chunk(7, [(BASE + 2 * PAGE, 1, DATA)], page(3)))  # it was on its way
    assert store.wants() == [WantedPages(8, BASE + 2 * PAGE, 1)]
    store.write(chunk(8, [(BASE + 2 * PAGE, 1, DATA)], page(9)))
    assert store.wants() == []
    store.end({8: ProcessTable(1, packed([(BASE, 4)]))})
    expected = [page(1), ZEROS, page(9), page(3)]
    assert list(content(store)[8].values()) == expected


def test_equal_pages_share_their_place_until_one_is_written(tmp_path: Path) -> None:
    store = MemoryStore.create(tmp_path, 16 << 20)
    own = {BASE + n * PAGE: page(n) for n in range(256)}
    for each in chunks(7, own):
        store.write(each)
    taken = (tmp_path / "memory").stat().st_blocks
    for pid in (8, 9, 10):
        for at in range(0, 256, 64):
            likes = [reference(page(n), 7, BASE + n * PAGE) for n in range(at, at + 64)]
            store.write(chunk(pid, [(BASE + at * PAGE, 64, REFERENCE)], b"".join(likes)))
    assert (tmp_path / "memory").stat().st_blocks == taken
    expected = {pid: dict(own) for pid in (7, 8, 9, 10)}
    for n, (pid, at) in enumerate([(8, 3), (7, 5), (8, 5), (9, 5), (10, 5), (7, 9), (7, 5)]):
        store.write(chunk(pid, [(BASE + at * PAGE, 1, DATA)], page(1000 + n)))
        expected[pid][BASE + at * PAGE] = page(1000 + n)
    store.write(chunk(9, [(BASE + 20 * PAGE, 10, ZERO)]))
    expected[9].update({BASE + n * PAGE: ZEROS for n in range(20, 30)})
    store.end(table(expected))
    assert content(store) == expected
    store.write(chunk(7, [(BASE, 1, DATA)], page(7), incarnation=2))  # the first one ends
    for n in range(300):
        store.write(chunk(11, [(BASE + n * PAGE, 1, DATA)], page(n)))
    del expected[7]
    store.end(table(expected))
    assert content(store) == expected
    store.close()


def test_a_later_life_of_the_agent_goes_on_with_what_was_saved(tmp_path: Path) -> None:
    memory = {7: {BASE + n * PAGE: page(n) if n % 3 else ZEROS for n in range(700)}, 8: {}}
    first = keep(memory, tmp_path)
    first.save()
    first.close()
    first.close()
    with pytest.raises(StepFailed, match="was closed"):
        first.end({})
    second = MemoryStore.load(tmp_path)
    assert content(second) == {7: memory[7]}
    with pytest.raises(StepFailed, match="is complete and takes no more pages"):
        second.write(chunk(7, [(BASE, 1, ZERO)]))
    (tmp_path / "on").mkdir()
    third = MemoryStore.create(tmp_path / "on", 4 << 20)
    assert read_table(msgspec.msgpack.encode(second.table)) == second.table

    def write_on(chunk: memoryview, release: Callable[[], None]) -> None:
        third.write(chunk)
        release()

    second.forward(write_on)
    third.end(second.table)
    assert content(third) == content(second)
    second.close()
    third.close()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes are not a chunk"),
        (b"LSM2" + bytes(16), "not a chunk of pages"),
        (bytes(2 << 20), "2097152 bytes are not a chunk"),
        (chunk(0, []), "ship: 0 is not a valid pid in a chunk"),
        (chunk(1 << 22, []), "4194304 is not a valid pid in a chunk"),
        (chunk(7, [(BASE, 1, 4)]), "kind 4 of a run is unknown"),
        (chunk(7, [(BASE, 1, 0)]), "kind 0 of a run is unknown"),
        (chunk(7, [(BASE + 1, 1, ZERO)]), "begins at 0x7f0000000001"),
        (chunk(7, [(1 << 56, 1, ZERO)]), "begins at 0x100000000000000"),
        (chunk(7, [((1 << 64) - PAGE, 2, ZERO)]), "begins at 0xfffffffffffff000"),
        (
            chunk(7, [((1 << 56) - PAGE, 2, ZERO)]),
            "a run of 2 pages at 0xfffffffffff000 does not fit",
        ),
        (chunk(7, [(BASE, 0, ZERO)]), "a run of 0 pages"),
        (chunk(7, [(BASE, 1, DATA)]), "chunk size 36 does not match its 1 runs, which take 8192"),
        (chunk(7, [(BASE, 1, DATA)], b"x" * 4095), "which take 8192"),
        (chunk(7, [(BASE, 1, DATA)], b"x" * 4097), "which take 8192"),
        (chunk(7, [(BASE, 1, ZERO)], b"x"), "chunk size 4097 does not match"),
        (chunk(7, [(BASE, 0xFFFFFFFF, DATA)]), "its runs exceed"),
        (chunk(7, [(BASE, 0xFFFFFFFF, REFERENCE)]), "its runs exceed"),
        (chunk(7, [(BASE, 1, ZERO)])[:30], "chunk size 30 does not match its 1 runs"),
        (
            struct.pack("<4sIIII", b"LSM1", 7, 1, 0, 255) + bytes(4076),
            "does not match its 255 runs",
        ),
        (struct.pack("<4sIIII", b"LSM1", 7, 1, 0, 1 << 31) + bytes(4076), "2147483648 runs"),
    ],
)
def test_what_is_no_chunk_is_refused_and_changes_nothing(
    store: MemoryStore, raw: bytes, words: str
) -> None:
    store.write(chunk(7, [(BASE, 1, DATA)], page(1)))
    with pytest.raises(StepFailed, match=words):
        store.write(raw)
    store.end({7: ProcessTable(1, packed([(BASE, 1)]))})
    assert content(store) == {7: {BASE: page(1)}}


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([(BASE, 1), (BASE, 1)], r"its table is invalid at 0x7f0000000000 \(1 pages\)"),
        ([(BASE + PAGE, 1), (BASE, 1)], "its table is invalid at"),
        ([(BASE, 2), (BASE + PAGE, 1)], "its table is invalid at"),
        ([(BASE + 1, 1)], "its table is invalid at"),
        ([(BASE, 0)], r"its table is invalid at 0x7f0000000000 \(0 pages\)"),
        ([(BASE, 1 << 63)], "its table is invalid at"),
        # More than was announced.
        ([(BASE, 1025)], r"its table is invalid at 0x7f0000000000 \(1025 pages\)"),
        ([(BASE + n * 8192 * PAGE, 1024) for n in range(3)], "its table is invalid at"),
        (b"123", r"invalid runs \(3 bytes\)"),
    ],
)
def test_what_is_no_table_is_refused(
    store: MemoryStore, runs: bytes | list[tuple[int, int]], words: str
) -> None:
    store.write(chunk(7, [(BASE, 3, ZERO)]))
    with pytest.raises(StepFailed, match=words):
        store.end({7: ProcessTable(1, runs if isinstance(runs, bytes) else packed(runs))})


def test_tables_come_as_messagepack() -> None:
    runs = packed([(BASE, 2), (BASE + 5 * PAGE, 1)])
    sent = {7: {"incarnation": 3, "runs": runs}}
    assert read_table(msgspec.msgpack.encode(sent)) == {7: ProcessTable(3, runs)}
    pairs = msgspec.msgpack.encode({7: {"incarnation": 3, "runs": [[BASE, 2]]}})
    for raw in (b"", b"\x80\x80", msgspec.msgpack.encode([1]), b"\x91" * 5000, pairs):
        with pytest.raises(StepFailed, match="the table of memory is not understood"):
            read_table(raw)


@pytest.mark.parametrize("count", [0x8001, 1 << 31])
def test_a_table_of_more_processes_than_there_can_be_is_refused_before_any_is_read(
    count: int,
) -> None:
    head = (
        b"\xde" + struct.pack(">H", count)
        if count < 1 << 16
        else b"\xdf" + struct.pack(">I", count)
    )
    with pytest.raises(StepFailed, match=f"table of memory names {count} processes"):
        read_table(head + b"\x01" * 100)


@pytest.mark.root
def test_a_full_file_system_is_told_and_nothing_is_taken_for_complete(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "ls-test", tmp_path], check=True)
    try:
        store = MemoryStore.create(tmp_path, 64 << 20)
        with pytest.raises(
            StepFailed, match=r"bytes of memory do not fit: the file system is full"
        ):
            store.reserve(8 << 20)
        several = [chunk(7, [(BASE + (n << 20), 255, DATA)], page(n) * 255) for n in range(4)]
        with pytest.raises(StepFailed, match="could not be kept: No space left"):
            list(map(store.write, several))
        with pytest.raises(StepFailed, match="has failed"):
            store.end({7: ProcessTable(1, packed([(BASE, 1)]))})
        with pytest.raises(StepFailed, match="has failed"):
            store.write(chunk(7, [(BASE, 1, ZERO)]))
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("cut", [0, 10, 24, 39, 41, -1])
def test_a_damaged_index_is_told(tmp_path: Path, cut: int) -> None:
    store = keep({7: {BASE + 2 * n * PAGE: page(n) for n in range(10)}}, tmp_path)
    store.save()
    store.close()
    path = tmp_path / "memory.index"
    raw = path.read_bytes()
    path.write_bytes(raw[:cut] if cut >= 0 else raw + b"x")
    with pytest.raises(StepFailed, match=r"memory\.index (cannot be read|is damaged)"):
        MemoryStore.load(tmp_path)
    path.unlink()
    with pytest.raises(StepFailed, match="No such file"):
        MemoryStore.load(tmp_path)


def test_lanes_write_at_the_same_time(tmp_path: Path) -> None:
    store = MemoryStore.create(tmp_path, 64 << 20)
    lanes, failed = 4, []

    def lane(k: int) -> None:
        try:
            for round_ in range(3):
                for n in range(k, 60, lanes):
                    data = page(n * 10 + round_) * 255
                    store.write(chunk(7 + n % 2, [(BASE + (n << 20), 255, DATA)], data))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=lane, args=(k,)) for k in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    expected = {
        pid: {
            BASE + (n << 20) + k * PAGE: page(n * 10 + 2)
            for n in range(60)
            if 7 + n % 2 == pid
            for k in range(255)
        }
        for pid in (7, 8)
    }
    store.end(table(expected))
    assert content(store) == expected
    store.close()


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([7, 8]),
        st.integers(1, 3),
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40), st.sampled_from([1, 2, 3, 3]))),
    ),
    max_size=16,
)


@settings(max_examples=100, deadline=None)
@given(_OPERATIONS)
def test_it_does_as_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    store = MemoryStore.create(directory, 4 << 20)
    model: dict[int, Pages] = {}
    incarnations = {7: 0, 8: 0}
    number = 0
    for pid, incarnation, runs in steps:
        for first, pages, kind in runs[:6]:
            places = range(BASE + first * PAGE, BASE + (first + pages) * PAGE, PAGE)
            fresh = {place: ZEROS for place in places}
            payload = b""
            if kind == REFERENCE:  # what the other has there; nothing else would be sent
                fresh = {p: d for p in places if (d := model.get(15 - pid, {}).get(p))}
                payload = b"".join(reference(data, 15 - pid, p) for p, data in fresh.items())
            elif kind == DATA:
                number += pages
                fresh = {place: page(number + n) for n, place in enumerate(places)}
                payload = b"".join(fresh.values())
            store.write(chunk(pid, [(*run, kind) for run in runs_of(fresh)], payload, incarnation))
            if incarnation > incarnations[pid]:
                model[pid] = {}
                incarnations[pid] = incarnation
            if incarnation == incarnations[pid]:
                model[pid].update(fresh)
    assert store.wants() == []
    store.end(
        {pid: ProcessTable(incarnations[pid], packed(runs_of(p))) for pid, p in model.items()}
    )
    assert content(store) == {pid: pages for pid, pages in model.items() if pages}
    store.close()


def test_a_chunk_holds_as_much_as_it_may(store: MemoryStore) -> None:
    made = list(chunks(7, {BASE + n * PAGE: page(n) for n in range(600)}))
    assert len(made[0]) == CHUNK
    with pytest.raises(StepFailed, match="not a chunk of pages"):
        store.write(chunk(7, [(BASE, 256, DATA)], page(1) * 256))
    for each in made:
        store.write(memoryview(each))
    store.end({7: ProcessTable(1, packed([(BASE, 600)]))})
    assert store.size == 600 * PAGE
