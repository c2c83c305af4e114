# SPDX-License-Identifier: Apache-2.0
"""What a host is: kernel, processor, CRIU, memory; and what it can offer to a capsule."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from .... import __version__
from ....criu_glue.criu.tool import Criu
from ...messages import HostFacts


def facts(criu: Criu | None) -> HostFacts:
    """The facts of this host. The agent reads them once: none changes while the kernel runs."""
    model, flags = "unknown", ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and model == "unknown":
            model = value.strip()
        elif key.strip() in ("flags", "Features") and not flags:
            flags = value.strip()
    return HostFacts(
        kernel=platform.release(),
        machine=platform.machine(),
        cpu=model,
        cpu_flags=sorted(flags.split()),
        criu=".".join(map(str, criu.version)) if criu else "",
        liveshift=__version__,
    )


def boot() -> str:
    """A text that differs after each boot of this machine (proc_sys_kernel(5), random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def memory_for_images() -> int:
    """Bytes that this host offers to images of capsules of other hosts: half of its memory."""
    return int(psutil.virtual_memory().total) // 2


def memory_left(gives_way: int = 0) -> float:
    """The share of this host's memory that is available, 0 to 1. ``gives_way``: as in
    :func:`memory_offered`."""
    memory = psutil.virtual_memory()
    return min(1.0, float((memory.available + gives_way) / memory.total))


def memory_to_spare(kept: float) -> int:
    """Bytes that are available here and not among the share ``kept`` of all memory; may be below
    0."""
    memory = psutil.virtual_memory()
    return int(memory.available - kept * memory.total)


def memory_offered(limit: int | None, gives_way: int = 0) -> int:
    """Bytes that an incoming capsule may take: what is available, at most the host's limit.
    ``gives_way``: bytes that would be free if they were needed."""
    available = int(psutil.virtual_memory().available) + gives_way
    return available if limit is None else min(available, limit)
