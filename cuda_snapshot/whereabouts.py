# SPDX-License-Identifier: Apache-2.0
"""Whether threads of a process are inside the CUDA driver, by their program counters and stacks.

A thread that is inside a driver call may hold the driver's locks. The driver's lock for a
checkpoint is a read-write lock of glibc: a thread that waits for it owns it as soon as the process
is unlocked, be the thread held or not (seen with driver 580 on an H100, 2026-11: the next lock then
failed with NOT_READY). And ranks that were inside a copy at the freeze failed there after the move
("invalid argument", or a fault of the GPU): a call that begins while memory is not mapped seems to
fail later, though the memory is back by then. So memory is taken away only while no thread that is
held is inside.

A thread that waits in the C library is inside if the driver has called the C library: the first
return address on its stack that is not of the C library itself is then the driver's. An address may
be left over from an earlier call, so the answer may be wrong (hold.py takes a thread that does not
run for one that is outside). If a thread is inside after all, the driver's lock that follows the
hold fails, before any memory has left the process, and the move is undone.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum

from .. import proc_text
from . import threads

DRIVER = re.compile(r".*/(libcuda|libcudadebugger|libnvidia-[^/]*)\.so[^/]*")
BETWEEN = re.compile(
    r".*/(libc|libpthread|libm|libdl|librt|libjemalloc|libtcmalloc[^/]*|libmimalloc"
    r"|lib(a|t|ub)san)(-[0-9.]+)?\.so[^/]*"
    r"|\[v(dso|syscall)\]"
)
"""What the driver calls, and what stands between it and its callers: these frames tell nothing."""

LOADER = re.compile(r".*/ld(-linux-[^/]*|-[0-9.]+)?\.so[^/]*")
"""It binds a function at its first call. Its frames are large and hold much that is left over."""

STACK, LOADER_STACK = 64 << 10, 4 << 10
"""At most this many bytes of a stack are read. Of a thread that is in the loader fewer are read,
and an address of the driver in them counts even if it may be left over."""

_CALLS = (
    (5, re.compile(rb"\xe8....", re.DOTALL)),
    (2, re.compile(rb"\xff[\x10-\x13\x16\x17\xd0-\xd7]")),
    (
        3,
        re.compile(rb"\xff[\x50-\x53\x55-\x57].|\x41\xff[\x10-\x17\xd0-\xd7]|\xff\x14.", re.DOTALL),
    ),
    (4, re.compile(rb"\x41\xff[\x50-\x57].|\xff\x54..", re.DOTALL)),
    (6, re.compile(rb"\xff[\x15\x90-\x93\x95-\x97]....", re.DOTALL)),
    (7, re.compile(rb"\x41\xff[\x90-\x97]....|\xff\x94.....|\xff\x14\x25....", re.DOTALL)),
)
"""Call instructions of x86-64 by their length (Intel's manual, volume 2, CALL)."""


class Code(Enum):
    """Whose code an address is."""

    NONE = "no code"
    DRIVER = "the driver's"
    BETWEEN = "the C library's or the like"
    LOADER = "the dynamic loader's"
    OTHER = "the program's"


class Whereabouts:
    """Looks at threads of one process, by the host's numbers. Threads that run are not seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._starts: list[int] = []
        self._mappings: list[tuple[int, int, Code]] = []
        """(start, end, whose) of executable mappings, in order."""

    def inside(self, tids: Iterable[int]) -> list[int]:
        """Those of the threads that are inside a call of the driver; not the driver's own threads,
        which were never outside. [] if the process has ended."""
        self._read_mappings()
        found = []
        with suppress(FileNotFoundError, ProcessLookupError):
            memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = [tid for tid in tids if self._is_inside(tid, memory)]
            finally:
                os.close(memory)
        return found

    def _is_inside(self, tid: int, memory: int) -> bool:
        registers = threads.registers(tid)
        if registers is None:
            return False
        stack, counter = registers
        first = self._whose(counter)
        if first is Code.OTHER or first is Code.NONE:
            return False
        if first is Code.LOADER:
            return Code.DRIVER in self._callers(stack, memory, LOADER_STACK)
        seen = first is Code.DRIVER
        for whose in self._callers(stack, memory):
            if whose is Code.DRIVER:
                seen = True
            elif whose is Code.OTHER:
                return seen
        return False

    def _callers(self, stack: int, memory: int, size: int = STACK) -> Iterable[Code]:
        """Whose code has called, from the innermost call outwards."""
        try:
            data = os.pread(memory, size, stack)
        except OSError:
            return
        for (word,) in struct.iter_unpack("<Q", data[: len(data) & ~7]):
            whose = self._whose(word)
            if whose in (Code.DRIVER, Code.OTHER) and _called(word, memory):
                yield whose

    def _whose(self, address: int) -> Code:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._mappings[index][1]:
            return Code.NONE
        return self._mappings[index][2]

    def _read_mappings(self) -> None:
        self._mappings = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in proc_text.lines(f"/proc/{self._pid}/maps"):
                span, rights, _, _, _, *path = line.split(maxsplit=5)
                if "x" in rights:
                    start, end = (int(part, 16) for part in span.split("-"))
                    self._mappings.append((start, end, _of(path[0] if path else "")))
        self._starts = [start for start, _, _ in self._mappings]


def _of(path: str) -> Code:
    path = path.removesuffix(" (deleted)")
    if DRIVER.fullmatch(path):
        return Code.DRIVER
    if LOADER.fullmatch(path):
        return Code.LOADER
    return Code.BETWEEN if BETWEEN.fullmatch(path) else Code.OTHER


def _called(address: int, memory: int) -> bool:
    """Whether a call instruction stands before the address."""
    try:
        before = os.pread(memory, 7, address - 7)
    except OSError:
        return False
    return len(before) == 7 and any(call.fullmatch(before[-size:]) for size, call in _CALLS)
