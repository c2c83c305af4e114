# SPDX-License-Identifier: Apache-2.0
"""Pages that a host has before they come: of other processes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import xxhash
from lazy_process import LazyProcess
from memory_parts import DATA, PAGE, REFERENCE, ZEROS, chunk, packed, reference
from test_memory_store import BASE, content, page

from liveshift.criu_glue.memory.donors import Donors
from liveshift.criu_glue.memory.store import MemoryStore, ProcessTable, Want
from liveshift.errors import StepFailed


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def word(value: int) -> bytes:
    return struct.pack("<Q", value).ljust(PAGE, b"\0")


def likeness(data: bytes) -> int:
    return xxhash.xxh3_128_intdigest(data)


def offered(donors: Donors) -> set[int]:
    raw = donors.offer()
    found = [n for (n,) in struct.iter_unpack("<Q", raw)]
    assert found == sorted(set(found))
    return set(found)


def lower(data: bytes) -> int:
    return likeness(data) & (1 << 64) - 1


@pytest.mark.root
def test_the_memory_of_a_running_process_is_offered_and_looked_up(held: ExitStack) -> None:
    process = LazyProcess(1000)
    held.callback(process.end)
    process("[lazy.set(n, 10**9 + n % 300) for n in range(0, 600)]")
    donors = Donors(1 << 30)
    assert donors.add_process(process.pid) > 600 * PAGE
    assert {lower(word(10**9 + n)) for n in range(300)} <= offered(donors)
    assert lower(ZEROS) not in offered(donors)
    assert donors.fetch(likeness(word(10**9 + 7))) == word(10**9 + 7)
    assert donors.fetch(likeness(word(10**9 + 301))) is None
    assert donors.fetch(lower(word(10**9 + 8))) is None, "the whole of the hash counts"
    process("[lazy.set(n, 5) for n in range(7, 600, 300)]")
    assert donors.fetch(likeness(word(10**9 + 7))) is None, "it is no longer what it was"
    process("lazy.unmap(0, 1000)")
    assert donors.fetch(likeness(word(10**9 + 8))) is None
    process.end()
    assert donors.fetch(likeness(word(10**9 + 9))) is None
    donors.close()


@pytest.mark.root
def test_a_donor_shares_its_memory_with_its_children_as_before(held: ExitStack) -> None:
    """Pages that are pinned to be read (process_vm_readv) would be copied for each."""
    process = LazyProcess(5000)
    held.callback(process.end)
    process("[lazy.set(n, n + 1) for n in range(5000)]")
    child = process("lazy.forked()")

    def own(pid: int) -> int:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.split("Pss_Anon:")[1].split()[0])

    before = own(process.pid) + own(child)
    with Donors_of(child) as donors:
        assert lower(word(4000)) in offered(donors)
        assert donors.fetch(likeness(word(4000))) == word(4000)
    assert own(process.pid) + own(child) < before + 4000


class Donors_of:
    def __init__(self, *pids: int) -> None:
        self._donors = Donors(1 << 30)
        for pid in pids:
            self._donors.add_process(pid)

    def __enter__(self) -> Donors:
        return self._donors

    def __exit__(self, *_: object) -> None:
        self._donors.close()


def test_what_another_process_has_need_not_come_again(tmp_path: Path, held: ExitStack) -> None:
    process = LazyProcess(502)
    held.callback(process.end)
    process("[lazy.set(n, 10**9 + n) for n in range(500)]")
    process("lazy.set(500, 0)")
    donors = Donors(1 << 30)
    donors.add_process(process.pid)
    hashes = offered(donors)
    assert {lower(word(10**9 + n)) for n in range(500)} <= hashes
    assert hashes.isdisjoint({lower(ZEROS), lower(word(10**9 + 1000))})
    store = MemoryStore.create(tmp_path, 4 << 20)
    here, other = word(10**9 + 3), page(1000)
    refer = chunk(
        9, [(BASE, 3, REFERENCE)],
        b"".join(reference(data, 0, 0) for data in (here, other, word(10**9 + 5))),
    )  # fmt: skip
    store.write(refer)
    assert store.wants() == [Want(9, BASE, 3)]
    store.use(donors)
    assert store.wants() == [Want(9, BASE + PAGE, 1)]
    store.write(chunk(9, [(BASE + PAGE, 1, DATA)], other))
    last = word(10**9 + 499)
    store.write(chunk(9, [(BASE + 3 * PAGE, 1, REFERENCE)], reference(last, 0, 0)))
    assert store.wants() == []
    store.end({9: ProcessTable(1, packed([(BASE, 4)]))})
    donors.close()
    assert list(content(store)[9].values()) == [here, other, word(10**9 + 5), last]
    again = reference(word(10**9 + 4), 0, 0)
    store.write(chunk(9, [(BASE, 1, REFERENCE)], again))  # it is held open
    assert store.wants() == []
    assert f"/proc/{process.pid}/mem" in open_files()
    store.close()
    with pytest.raises(StepFailed, match="was let go of"):
        donors.offer()
    assert f"/proc/{process.pid}/mem" not in open_files()


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_no_more_is_known_than_was_allowed(held: ExitStack) -> None:
    process = LazyProcess(50)
    held.callback(process.end)
    process("[lazy.set(n, 10**9 + n) for n in range(50)]")
    donors = Donors(20 * PAGE)
    assert donors.add_process(process.pid) > 0
    assert len(offered(donors)) == 20
    with pytest.raises(RuntimeError, match="not added to"):
        donors.add_process(process.pid)
    donors.close()


def test_a_process_that_is_not_there_and_a_look_that_is_broken_off(held: ExitStack) -> None:
    donors = Donors(1 << 30)
    assert donors.add_process((1 << 22) - 1) == 0
    process = LazyProcess(10)
    held.callback(process.end)
    assert donors.add_process(process.pid, stopped=lambda: True) == 0
    assert donors.offer() == b""
    donors.close()
    donors.close()
