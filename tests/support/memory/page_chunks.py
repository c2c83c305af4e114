# SPDX-License-Identifier: Apache-2.0
"""A destination for chunks of pages, which believes nothing, in plain Python."""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import xxhash

PAGE = 4096
DATA, ZERO, REFERENCE = 1, 2, 3


class Pages:
    """Keeps what comes; :meth:`differences` holds it against the processes themselves."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, bytes]] = {}  # inner pid: address: content
        self.incarnations: dict[int, int] = {}
        self.kinds: Counter[int] = Counter()  # pages by kind
        """Pages that the destination is said to have, and their hashes."""
        self.rounds: set[int] = set()
        self.chunks = 0
        self.held: list[Callable[[], None]] | None = None
        """With a list chunks are kept back in it: their memory may not be used again."""
        self._lock = threading.Lock()

    def __call__(self, chunk: memoryview, release: Callable[[], None]) -> None:
        with self._lock:
            self._take(chunk)
        if self.held is None:
            release()
        else:
            self.held.append(release)

    def _take(self, chunk: memoryview) -> None:
        assert 20 < len(chunk) <= 1 << 20
        magic, inner, incarnation, number, count = struct.unpack_from("<4sIIII", chunk)
        assert magic == b"LSM1"
        assert 0 < count <= 254
        if self.incarnations.get(inner) != incarnation:
            assert incarnation > self.incarnations.get(inner, 0)
            self.incarnations[inner] = incarnation
            self.of[inner] = {}
        self.rounds.add(number)
        self.chunks += 1
        pages = self.of[inner]
        at = PAGE
        for i in range(count):
            address, length, kind = struct.unpack_from("<QII", chunk, 20 + 16 * i)
            assert address % PAGE == 0
            assert length > 0
            self.kinds[kind] += length
            for here in range(address, address + length * PAGE, PAGE):
                if kind == DATA:
                    pages[here] = bytes(chunk[at : at + PAGE])
                    at += PAGE
                elif kind == ZERO:
                    pages[here] = bytes(PAGE)
                else:
                    assert kind == REFERENCE
                    low, high, donor, there = struct.unpack_from("<QQIQ", chunk, at)
                    at += 28
                    pages[here] = self.of[donor][there]
                    assert xxhash.xxh3_128_intdigest(pages[here]) == high << 64 | low
        assert len(chunk) == (at if at > PAGE else 20 + 16 * count), "more than its runs explain"

    def differences(self, pid: int, inner: int, table: dict[int, dict[str, object]]) -> list[str]:
        """Where a frozen process and what came of it are not the same."""
        found = []
        row = table[inner]
        assert row["incarnation"] == self.incarnations.get(inner, row["incarnation"])
        listed = set()
        runs = row["runs"]
        assert isinstance(runs, bytes)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for address, pages in struct.iter_unpack("<QQ", runs):
                for here in range(address, address + pages * PAGE, PAGE):
                    memory.seek(here)
                    there = memory.read(PAGE)
                    listed.add(here)
                    mine = self.of[inner].get(here, b"")
                    if mine == there:
                        continue
                    where = [i for i, (a, b) in enumerate(zip(mine, there, strict=False)) if a != b]
                    if not mine or (where and not _processor_number(where, there)):
                        found.append(f"{here:#x} at {where[:8]}")
        for start, end in anonymous_ranges(pid):
            left_out = resident(pid, start, end) - listed
            found += [f"{here:#x} is there and not in the table" for here in left_out]
        return found


def anonymous_ranges(pid: int) -> list[tuple[int, int]]:
    """As CRIU sees them: private, anonymous, neither locked nor special, and not executable."""
    found = []
    at = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0].endswith(":"):
            if words[0] == "VmFlags:" and at and not {"lo", "ht", "io", "pf"} & set(words):
                found.append(at)
            continue
        name = words[5] if len(words) > 5 else ""
        start, end = (int(edge, 16) for edge in words[0].split("-"))
        plain = name in ("", "[heap]", "[stack]") or name.startswith("[anon:")
        own = words[1][2:] == "-p" and words[4] == "0" and plain
        at = (start, end) if own else None
    return found


def resident(pid: int, start: int, end: int) -> set[int]:
    """The pages with memory of their own (pagemap: present or swapped, not of a file, no guard)."""
    found = set()
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for at in range(start, end, 64 << 20):
            pagemap.seek(at >> 9)
            length = min(64 << 20, end - at)
            for i, (entry,) in enumerate(struct.iter_unpack("<Q", pagemap.read(length >> 9))):
                own = entry >> 62 & 3 and not entry >> 61 & 1 and not entry >> 58 & 1
                if own and not _is_zero_frame(entry):
                    found.add(at + i * PAGE)
    return found


def _is_zero_frame(entry: int) -> bool:
    """The kernel's page of zeros has no exclusive owner and is in no other way told apart here."""
    if entry >> 62 & 1:  # swapped
        return False
    frame = entry & (1 << 55) - 1
    flags = Path("/proc/kpageflags")
    with flags.open("rb", buffering=0) as pages:
        pages.seek(frame * 8)
        return bool(struct.unpack("<Q", pages.read(8))[0] >> 24 & 1)  # KPF_ZERO_PAGE


def _processor_number(where: list[int], page: bytes) -> bool:
    """Whether only struct rseq's numbers of a processor differ (cpu_id_start, cpu_id, node_id and
    mm_cid of linux/rseq.h): the kernel writes them whenever a thread goes on, be it for CRIU's own
    code, and again after a restore."""
    first = where[0] & ~31  # how it is aligned
    numbers = struct.unpack_from("<II", page, first)
    inside = {*range(8), *range(20, 28)}
    return {at - first for at in where} <= inside and numbers[0] == numbers[1] < (
        os.cpu_count() or 1
    )
