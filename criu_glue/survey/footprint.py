# SPDX-License-Identifier: Apache-2.0
"""Measures the parts of a capsule's size that decide how long a move takes.

The figures come from /proc alone. The kernel walks the page tables for them, about 5 ms per GiB of
small pages, while the tasks run on.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from ..capsule.sandboxes import Sandbox
from ..capsule.tree import tasks
from .found import Footprint

_SHARED = b" /dev/zero (deleted)\n"
"""The end of a line in /proc/PID/maps for shared memory without a name (proc(5))."""


def footprint(sandbox: Sandbox) -> Footprint:
    """The footprint of all processes of a sandbox below process 1. A process that ends meanwhile is
    left out."""
    return measure(task.pid for task in tasks(sandbox))


def measure(pids: Iterable[int]) -> Footprint:
    """The footprint of the processes with these pids of the host."""
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
