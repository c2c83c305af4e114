# SPDX-License-Identifier: Apache-2.0
"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
CGROUP_V2 = Path("/sys/fs/cgroup")


def usable(own_groups: Path = OWN_GROUPS, mounted: Path = CGROUP_V2) -> float:
    """Return how many cores this process may use: the smallest of its CPU affinity and the quotas
    (cpu.max, see cgroups(7)) of its cgroup v2 and all cgroups above it. May be a fraction: 1.5."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(own_groups, mounted)])


def threads(most: int) -> int:
    """Return how many computing threads are useful: one for each usable core, at most ``most``."""
    return min(most, math.ceil(usable()))


def _quotas(own_groups: Path, mounted: Path) -> list[float]:
    lines = own_groups.read_text().splitlines() if own_groups.exists() else []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    # A container that sees only its own part of the tree finds its group at the top instead.
    group = mounted / own.lstrip("/")
    found = []
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file; or "max": no quota
            quota, period = map(int, (each / "cpu.max").read_text().split())
            found.append(quota / period)
        if each == mounted:
            break
    return found
