# SPDX-License-Identifier: Apache-2.0
"""Checks what CRIU and capsules need of the kernel by trying it, not by reading its config."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from ...criu_glue.memory.source.tracker import MemoryTracker
from .finding import Finding, Verdict, attempt, judged

MINIMUM = (5, 9)
"""Linux 5.9 brought close_range, which empties a capsule of inherited descriptors. Linux 5.6
brought time namespaces; without them a moved rank's CLOCK_MONOTONIC jumps."""

NAMESPACES = ("pid", "mount", "uts", "ipc", "net", "time")


def release() -> Iterator[Finding]:
    """Check the kernel's version."""
    found = platform.release()
    match = re.match(r"(\d+)\.(\d+)", found)
    new_enough = match is not None and (int(match[1]), int(match[2])) >= MINIMUM
    needed = f"Linux {MINIMUM[0]}.{MINIMUM[1]} or newer"
    found = f"Linux {found}, {platform.machine()}"
    yield judged("kernel", found, needed, new_enough, "boot a newer kernel")


def checkpoint_restore() -> Iterator[Finding]:
    """Check for CONFIG_CHECKPOINT_RESTORE by two files that exist only with it."""
    needed = "CONFIG_CHECKPOINT_RESTORE"
    places = (Path("/proc/self/map_files"), Path("/proc/sys/kernel/ns_last_pid"))
    missing = [str(place) for place in places if not place.exists()]
    yield judged(
        "checkpoint/restore",
        f"{' and '.join(missing)} missing" if missing else "map_files, ns_last_pid",
        needed,
        not missing,
        f"boot a kernel built with {needed}=y (the distributions' are)",
    )


def namespaces() -> Iterator[Finding]:
    """Make every namespace of a capsule at once, in a child that ends at once. If that fails, try
    each by itself to name those that are refused."""
    needed = f"{', '.join(NAMESPACES)} namespaces"
    problem = attempt("unshare", "--fork", *(f"--{kind}" for kind in NAMESPACES), "true")
    if problem is None:
        yield Finding("namespaces", "made all of them", needed, Verdict.OK)
        return
    kinds_by_reason: dict[str, list[str]] = {}
    for kind in NAMESPACES:
        reason = attempt("unshare", "--fork", f"--{kind}", "true")
        if reason is not None:
            kinds_by_reason.setdefault(reason, []).append(kind)
    refused = [f"{', '.join(kinds)}: {reason}" for reason, kinds in kinds_by_reason.items()]
    yield Finding(
        "namespaces",
        "; ".join(refused) or problem,
        needed,
        Verdict.FAIL,
        "run as root, outside of containers that forbid namespaces; unshare is in util-linux",
    )


def write_tracking() -> Iterator[Finding]:
    """Check what pre-copy needs, with the same probe as the agents."""
    problem = MemoryTracker.probe()
    yield judged(
        "write tracking",
        problem or "userfaultfd WP_ASYNC, PAGEMAP_SCAN",
        "optional: pre-copy, Linux 6.7 or newer, x86-64",
        not problem,
        "jobs move without it, but are paused longer",
        Verdict.WARN,
    )
