# SPDX-License-Identifier: Apache-2.0
"""Finds the memory of a process that the tracker carries, outside CRIU's images.

It is the memory that ``criu restore --lazy-pages`` leaves to a lazy-pages daemon (criu:
vma_entry_can_be_lazy): anonymous, private, not locked, and not hugetlbfs. CRIU carries executable
memory, since CRIU works in it while it holds the process.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

# proc_pid_maps(5): private and not executable, without a file (device 00:00, inode 0), and without
# a name except those of plain memory. Other names in brackets are the kernel's ([vdso], [vvar] …).
_OURS = re.compile(
    rb"([0-9a-f]+)-([0-9a-f]+) ..-p [0-9a-f]+ 00:00 0 *(?:|\[heap\]|\[stack\]|\[anon:.*\])"
)
_VDSO = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .*\[vdso\]$", re.MULTILINE)
_FLAGS = re.compile(rb"^VmFlags: (.*)$")
_libc = ctypes.CDLL(None)
_KCMP, _KCMP_VM = 312, 1  # kcmp(2) on x86-64

_NO_PAGES = frozenset({b"lo", b"ht", b"pf", b"io"})
"""A mapping with one of these flags is CRIU's (proc_pid_smaps(5)): ``lo`` is locked, ``ht`` is
hugetlbfs, and ``pf`` and ``io`` are mapped by a driver."""


def own_ranges(pid: int, locked: bool) -> list[tuple[int, int]]:
    """Return the ranges [start, end) that the tracker carries, sorted; [] for a zombie.

    ``locked``: the process has locked memory. Then the function must read the flags of each mapping
    (5 ms per GiB). Raises FileNotFoundError or ProcessLookupError when the process has ended.
    """
    if locked:
        return _plain_ranges(Path(f"/proc/{pid}/smaps").read_bytes())
    lines = Path(f"/proc/{pid}/maps").read_bytes().split(b"\n")
    matches = (_OURS.fullmatch(line) for line in lines if b" 00:00 0 " in line)
    return [(int(found[1], 16), int(found[2], 16)) for found in matches if found]


def _plain_ranges(smaps: bytes) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    at: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if header := _OURS.fullmatch(line):
            at = int(header[1], 16), int(header[2], 16)
        elif flags := _FLAGS.match(line):
            if at and _NO_PAGES.isdisjoint(flags[1].split()):
                found.append(at)
            at = None
    return found


def vdso(pid: int) -> tuple[int, int] | None:
    """Return where the vdso, the kernel's code in the process, lies; None when there is none."""
    found = _VDSO.search(Path(f"/proc/{pid}/maps").read_bytes())
    return (int(found[1], 16), int(found[2], 16)) if found else None


def shares_memory(pid: int, other: int) -> bool:
    """Whether two processes have one address space, as after vfork(2); False if one has ended."""
    return bool(_libc.syscall(_KCMP, pid, other, _KCMP_VM, 0, 0) == 0)
