# SPDX-License-Identifier: Apache-2.0
"""How large a capsule is, in what decides how long a move of it takes.

From /proc alone; the kernel walks the page tables for it, about 5 ms per GiB of small pages, while
the tasks run on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from ..capsule.room import Room
from ..capsule.tree import tasks
from .found import Footprint

_SHARED = b" /dev/zero (deleted)\n"
"""How proc(5) ends the line of shared memory without a name."""


def footprint(room: Room) -> Footprint:
    """What the processes of a room below process 1 take now; one that ends meanwhile counts as far
    as it was seen."""
    return measure(task.pid for task in tasks(room))


def measure(pids: Iterable[int]) -> Footprint:
    """The same for some processes, by their pids here."""
    private = copied = shared = processes = threads = mappings = shared_mappings = 0
    for pid in pids:
        try:
            sizes = _rolled_up(pid)
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            threads += psutil.Process(pid).num_threads()
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue
        private += sizes.get("Pss_Anon", 0) + sizes.get("SwapPss", 0)
        copied += sizes.get("Anonymous", 0) + sizes.get("Swap", 0)
        shared += sizes.get("Pss_Shmem", 0)
        processes += 1
        mappings += maps.count(b"\n")
        shared_mappings += maps.count(_SHARED)
    return Footprint(private, shared, processes, threads, mappings, copied, shared_mappings)


def _rolled_up(pid: int) -> dict[str, int]:
    """Sums over all mappings of a process, in bytes (Documentation/filesystems/proc.rst)."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) << 10
    return found
