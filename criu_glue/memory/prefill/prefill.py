# SPDX-License-Identifier: Apache-2.0
"""The prefill: it puts cold memory in place before the restore, while the job runs at its source.

The memory lies in an early CRIU, which waits in a library of ours (prefill_shim.c, prefill.h). The
memory is in huge pages, and its addresses differ from the job's by a multiple of their size. CRIU
forks the tasks, and only fork passes a page to another process without a copy. It takes 0.6 ms/GB
in huge pages and 25 ms/GB in small ones.

At the freeze the prefill copies once more the pages that the job has written meanwhile. It
copies them into memory that is there already. The fill would need fresh pages, which cost 5 ms for
each 2 MiB on a virtual machine whose hypervisor takes free memory back. Pages that are still
outdated after that are freed one by one, and :class:`~.fill.FillEngine` copies them like all pages
that were never put here.

The store knows which memory is cold (cold.h). Each error ends in :class:`PrefillLost`, and a fresh
CRIU then restores the tree without the prefill. The pages that only the early CRIU keeps
(:meth:`Prefill.evict`) are written back first. If not all can be written back, the restore
fails and the tree goes on at its source.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ....errors import StepFailed
from ..engine import PAGE
from ..store import store_library
from ..store.store import MemoryStore
from .mapped import TOP, PrefillLost, Region, mapped

BLOCK = 2 << 20
"""The bytes of a huge page (x86-64, and arm64 with pages of 4 KiB)."""

SLACK = 128 << 30
"""This many bytes of address space are reserved on each side of the first block that is put in
place, since the mapping may become larger."""

PLAN_LIMIT = 64 << 20
"""The plan has at most this many bytes."""

SPARE = 1 << 30
"""A host that has less free memory than this many bytes must not keep a page twice, in the store
and in the early CRIU."""

LEAST = 384 << 20
"""A host that has less free memory than this many bytes must put no memory in place."""

ANSWER_S = 20.0

_RECEIVING, _IDLE, _FROZEN = range(3)  # cold.h

_MAP, _GROW, _COPY, _WRITE_BACK, _DISCARD, _RESTORE = range(6)
_ORDER = struct.Struct("<IIQQQQq")
_ANSWER = struct.Struct("<qq")
_DISCARD_RANGES = 4096  # ranges in one message
_RANGE = struct.Struct("<QQ")
_PLAN = struct.Struct("<IIII")
_PLAN_PROCESS = struct.Struct("<IIIIQQ")
_PLAN_VMA = struct.Struct("<QQQII")
_MAGIC = 0x4C50534C

_NONE_NOW = (errno.ENOMEM, errno.EAGAIN, errno.EBUSY)
"""MADV_COLLAPSE gives one of these errors when there is no contiguous memory (madvise(2))."""


class NoHugePage(Exception):
    """The kernel had no huge page for a block. All that is in place stays in place."""


@dataclass
class Area:
    """Memory of one process in the early CRIU. [start, end) is mapped; [low, high) is reserved."""

    pid: int
    incarnation: int
    start: int
    end: int
    low: int
    high: int
    shift: int
    blocks: list[int] = field(default_factory=list)  # addresses, in order


class Prefill:
    """The memory in one early CRIU. ``orders`` is our end of the socket of its library. Only one
    thread at a time may use this. Methods raise PrefillLost, and StepFailed if the store is closed.
    """

    def __init__(self, store: MemoryStore, orders: socket.socket) -> None:
        self._ffi, self._calls = store_library.load()
        self._store = store
        self._orders = orders
        orders.settimeout(ANSWER_S)
        self.plan_fd = os.memfd_create("liveshift-plan", os.MFD_CLOEXEC)
        self._areas: list[Area] = []
        self.plan: mmap.mmap | None = None
        """The plan, for the fill. After the restore it also says which mappings were placed."""
        self._pids: set[int] = set()  # the processes that have memory in place
        self._block = self._ffi.new("struct block *")
        self.bytes = 0
        """The bytes put in place so far; after :meth:`plan_restore` only the current ones."""
        self._in_both: list[tuple[int, int, int]] = []  # blocks that the store has, too
        self.evicted = False
        """Whether only the early CRIU keeps some of the pages."""

    def close(self) -> None:
        """Close all descriptors. A second call is allowed; a call while a fill uses the plan is
        not."""
        self._orders.close()
        if self.plan_fd >= 0:
            os.close(self.plan_fd)
            self.plan_fd = -1

    def abandon(self) -> None:
        """Make the order fail that another thread waits for."""
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)

    def step(self, search: object, idle: bool) -> bool:
        """Put one more block in place. False when there is none from the position of ``search`` to
        the end. ``idle``: no chunks come at present."""
        return self._next(search, _IDLE if idle else _RECEIVING)

    def copy_outdated(self, search: object) -> bool:
        """At the freeze, copy the outdated pages of one more block again. False as in
        :meth:`step`."""
        return self._next(search, _FROZEN)

    def _next(self, search: object, when: int) -> bool:
        block = self._block
        with self._store.in_use() as store:
            if not self._calls.store_next_cold(store, search, when, block):
                return False
            try:
                self._copy(block)
            except OSError as error:
                # The store does not know which of the earlier pages of the block are still there.
                if not block.fresh:
                    raise PrefillLost(f"it cannot be copied again: {error.strerror}") from error
                what = f"the kernel has no free huge page: {error.strerror}"
                if error.errno not in _NONE_NOW:
                    raise PrefillLost(what) from error
                self._calls.store_not_copied(store, block.pid, block.address)
                raise NoHugePage(what) from error
            self._in_both.append((block.pid, block.incarnation, block.address))
        return True

    def evict(self, size: int) -> None:
        """For this many bytes in place, the store gives up its own copy from now on."""
        with self._store.in_use() as store:
            while self._in_both and size > 0:
                evicted = self._calls.store_evict(store, *self._in_both.pop()) * PAGE
                self.evicted |= evicted > 0
                size -= evicted

    def discard_outdated(self) -> None:
        """Free outdated pages where that gives memory back. :meth:`plan_restore` frees the rest."""
        listed = self._calls.store_list_outdated
        for area in self._areas:
            self.bytes -= self._discard(area, listed, area.pid, area.incarnation)

    def search(self) -> object:
        """Return a new search that begins at the first block."""
        return self._ffi.new("struct cold_cursor *")

    def plan_restore(self, images: Path) -> int:
        """Once the image is complete: free outdated pages, plan where the others belong, and free
        those that have no place. Return how many mappings have memory in place."""
        incarnations = self._store.incarnations()
        for area in self._areas:
            if incarnations.get(area.pid) != area.incarnation:  # this process has ended
                self._free(area, [(area.start, (area.end - area.start) // PAGE)])
        self._areas = [a for a in self._areas if incarnations.get(a.pid) == a.incarnation]
        for area in self._areas:
            self._discard(area, self._calls.store_apply_table, area.pid)
        plan = mapped(images, incarnations)
        found = 0
        for area in self._areas:
            placed = self._place(area, plan[area.pid])
            found += placed
            if placed:
                self._pids.add(area.pid)
        self._write(plan)
        raw = self._ffi.from_buffer("uint8_t[]", self.plan)
        self.write_back(raw)
        for area in self._areas:
            self._discard(area, self._calls.store_apply_plan, raw, area.pid)
        with self._store.in_use() as store:
            self.bytes = self._calls.store_preplaced(store) * PAGE
        return found

    def write_back(self, plan: object = None) -> None:
        """Write the pages that only the early CRIU keeps into the store again. Without a plan these
        are all; with one, those that no mapping of the plan moves to their place."""
        block, plan = self._block, self._ffi.NULL if plan is None else plan
        for area in self._areas if self.evicted else ():
            for address in area.blocks:
                with self._store.in_use() as store:
                    if not self._calls.store_orphaned(
                        store, plan, area.pid, area.incarnation, address, block
                    ):
                        continue
                    slots = bytes(self._ffi.buffer(block.slot))
                    self._order(_WRITE_BACK, area.shift, address, count=len(slots) // 4, more=slots)
                    self._calls.store_written_back(store, block)

    def begin_restore(self) -> None:
        """Order the early CRIU to begin the restore."""
        self._order(_RESTORE)

    def check(self, processes: Mapping[int, int]) -> None:
        """Check samples of pages in all restored processes. ``processes``: inner pid to host's pid.
        Raises StepFailed for a wrong page."""
        assert self.plan is not None
        why = self._ffi.new("char[]", store_library.WHY)
        plan = self._ffi.from_buffer("uint8_t[]", self.plan)
        for pid in self._pids:
            if pid not in processes:
                raise StepFailed("restore", f"process {pid} is not there")
            with self._store.in_use() as store:
                if self._calls.store_verify_preplaced(store, plan, pid, processes[pid], why) != 0:
                    raise StepFailed("restore", self._ffi.string(why).decode("utf-8", "replace"))

    def _copy(self, block: Any) -> None:
        address, fresh = block.address, block.fresh
        area = self._area(block.pid, block.incarnation, address)
        slots = bytes(self._ffi.buffer(block.slot))
        self._order(_COPY, area.shift, address, int(fresh), count=len(slots) // 4, more=slots)
        if fresh:
            if not _holds(area, address, address + PAGE):
                bisect.insort(area.blocks, address)
            self.bytes += BLOCK

    def _area(self, pid: int, incarnation: int, address: int) -> Area:
        for area in self._areas:
            if (area.pid, area.incarnation) == (pid, incarnation) and (
                area.low <= address and address + BLOCK <= area.high
            ):
                self._grow(area, address, address + BLOCK)
                return area
        low, high = max(0, address - SLACK), min(TOP, address + SLACK)
        shift = self._order(_MAP, 0, address, address + BLOCK, low, high)
        self._areas.append(Area(pid, incarnation, address, address + BLOCK, low, high, shift))
        return self._areas[-1]

    def _grow(self, area: Area, start: int, end: int) -> None:
        if start < area.start:
            self._order(_GROW, area.shift, start, area.start)
            area.start = start
        if end > area.end:
            self._order(_GROW, area.shift, area.end, end)
            area.end = end

    def _discard(self, area: Area, listed: Callable[..., int], *of: object) -> int:
        """Free the pages of the area that ``listed(store, *of, …)`` lists. Return their bytes."""
        discards = self._ffi.new("struct discards *")
        with self._store.in_use() as store:
            rc = listed(store, *of, area.start, area.end, discards)
        size = discards.used * _RANGE.size
        raw = bytes(self._ffi.buffer(discards.list, size)) if size else b""
        self._calls.free(discards.list)
        if rc != 0:
            raise PrefillLost("out of memory for the list of freed pages")
        return self._free(area, list(_RANGE.iter_unpack(raw)))

    def _free(self, area: Area, ranges: Sequence[tuple[int, int]]) -> int:
        """Free ranges of (address, pages). Return their bytes."""
        for at in range(0, len(ranges), _DISCARD_RANGES):
            part = ranges[at : at + _DISCARD_RANGES]
            packed = b"".join(_RANGE.pack(*each) for each in part)
            self._order(_DISCARD, area.shift, count=len(part), more=packed)
        return sum(pages for _, pages in ranges) * PAGE

    def _place(self, area: Area, mappings: Sequence[Region]) -> int:
        found = 0
        for mapping in mappings:
            end = mapping.start + mapping.size
            if not mapping.ours or mapping.start < area.low or end > area.high:
                continue
            holders = [
                a for a in self._areas if a.pid == area.pid and _holds(a, mapping.start, end)
            ]
            if holders != [area]:  # only one area could be moved to the mapping's place
                continue
            self._grow(area, mapping.start, end)
            mapping.source = mapping.start + area.shift
            found += 1
        return found

    def _write(self, plan: dict[int, list[Region]]) -> None:
        processes, mappings, count = b"", bytearray(), 0
        for pid, of in plan.items():
            total = sum(mapping.size for mapping in of)
            processes += _PLAN_PROCESS.pack(pid, count, len(of), 0, total, _base_rest(of))
            for m in of:
                mappings += _PLAN_VMA.pack(m.start, m.size, m.source, 0, 0)
            count += len(of)
        raw = _PLAN.pack(_MAGIC, len(plan), count, 0) + processes + mappings
        if len(raw) > PLAN_LIMIT:
            raise PrefillLost(f"the image has {count} mappings, too many to place in advance")
        os.ftruncate(self.plan_fd, len(raw))
        self.plan = mmap.mmap(self.plan_fd, len(raw))
        self.plan[:] = raw

    def _order(
        self,
        op: int,
        shift: int = 0,
        start: int = 0,
        end: int = 0,
        low: int = 0,
        high: int = 0,
        *,
        count: int = 0,
        more: bytes = b"",
    ) -> int:
        try:
            self._orders.send(_ORDER.pack(op, count, start, end, low, high, shift) + more)
            answer = self._orders.recv(_ANSWER.size)
        except OSError as error:
            # It may be a timeout. A late answer must not pass for the answer to the next order.
            self.abandon()
            raise PrefillLost(f"the early CRIU does not answer: {error}") from error
        if len(answer) != _ANSWER.size:
            raise PrefillLost("the early CRIU has ended")
        negative, shifted = _ANSWER.unpack(answer)
        if negative:
            raise OSError(-negative, os.strerror(-negative))
        return int(shifted)


def _holds(area: Area, start: int, end: int) -> bool:
    first = bisect.bisect_left(area.blocks, start - BLOCK + PAGE)
    return first < len(area.blocks) and area.blocks[first] < end


def _base_rest(mappings: Sequence[Region]) -> int:
    """Return the offset within a block at which CRIU's reservation for all mappings should begin.

    With it, as much memory as possible has the same offset in the reservation as at its final
    address, so that the kernel can move whole page tables."""
    weights: dict[int, int] = {}
    offset = 0
    for mapping in mappings:
        if mapping.source:
            rest = (mapping.start - offset) % BLOCK
            weights[rest] = weights.get(rest, 0) + mapping.size
        offset += mapping.size
    return max(weights, key=weights.__getitem__) if weights else 0


def memory_left() -> int:
    """Return the bytes of memory that this host can still give (proc(5), MemAvailable)."""
    return int(psutil.virtual_memory().available)
