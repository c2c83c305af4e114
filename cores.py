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
    """Cores that it may run on, or, where that is less, the CPU seconds a second that the quotas
    (cpu.max, see cgroups(7)) of its cgroup v2 and of those above that leave: such as 1.5."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(own_groups, mounted)])


def threads(most: int) -> int:
    """How many threads that compute are worth while: one for each usable core, ``most`` at most."""
    return min(most, math.ceil(usable()))


def _quotas(own_groups: Path, mounted: Path) -> list[float]:
    lines = own_groups.read_text().splitlines() if own_groups.exists() else []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    # A container that sees only its own part of the tree has nothing at that path, but at the top.
    group = mounted / own.lstrip("/")
    found = []
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max": none
            quota, period = map(int, (each / "cpu.max").read_text().split())
            found.append(quota / period)
        if each == mounted:
            break
    return found
