# SPDX-License-Identifier: Apache-2.0
"""Which memory of a process travels apart from CRIU's images.

It is what ``criu restore --lazy-pages`` leaves to others (criu: vma_entry_can_be_lazy): anonymous,
private, not locked, no huge pages of hugetlbfs. Executable parts stay CRIU's: it works in them
while it has the process in its hands.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

# proc_pid_maps(5): private and not executable, no file (device 00:00, inode 0), and no name but
# those of plain memory. The others in brackets are the kernel's ([vdso], [vvar] …).
_OURS = re.compile(
    rb"([0-9a-f]+)-([0-9a-f]+) ..-p [0-9a-f]+ 00:00 0 *(?:|\[heap\]|\[stack\]|\[anon:.*\])"
)
_VDSO = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .*\[vdso\]$", re.MULTILINE)
_FLAGS = re.compile(rb"^VmFlags: (.*)$")
_libc = ctypes.CDLL(None)
_KCMP, _KCMP_VM = 312, 1  # kcmp(2) on x86-64

_NO_PAGES = frozenset({b"lo", b"ht", b"pf", b"io"})
"""Locked, hugetlbfs, and what a driver has mapped (proc_pid_smaps(5))."""


def own_ranges(pid: int, locked: bool) -> list[tuple[int, int]]:
    """Its memory that is ours to carry, [start, end), sorted; [] of a zombie.

    ``locked``: some of its memory is, which takes a closer look (5 ms per GiB). Raises
    FileNotFoundError or ProcessLookupError when it has gone.
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
    """Where the kernel's own code lies in the process."""
    found = _VDSO.search(Path(f"/proc/{pid}/maps").read_bytes())
    return (int(found[1], 16), int(found[2], 16)) if found else None


def shares_memory(pid: int, other: int) -> bool:
    """Whether two processes have one address space, as after vfork(2); False when one has gone."""
    return bool(_libc.syscall(_KCMP, pid, other, _KCMP_VM, 0, 0) == 0)
