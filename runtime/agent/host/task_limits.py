# SPDX-License-Identifier: Apache-2.0
"""How many more threads this host can have: what the kernel and the agent's control group allow.

A restored tree is a descendant of the agent, so it counts in the agent's control group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNEL = Path("/proc/sys/kernel")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """A limit on threads: ``most`` are allowed, ``left`` can be added; ``name`` is the setting."""

    name: str
    most: int
    left: int
    remedy: str


def tightest() -> Limit:
    """The limit that this host reaches first."""
    return min((*_of_kernel(), *_of_control_groups()), key=lambda limit: limit.left)


def _of_kernel() -> Iterator[Limit]:
    now = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    for name in ("pid_max", "threads-max"):
        most = int((KERNEL / name).read_text())
        remedy = f"raise it: sysctl -w kernel.{name}=4194304"
        yield Limit(f"kernel.{name}", most, most - now, remedy)


def _of_control_groups(
    own: Path = Path("/proc/self/cgroup"), root: Path = CONTROL_GROUPS
) -> Iterator[Limit]:
    """The limits of all groups from the agent's up to the root: cgroup v2, or pids of v1."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                most = int((group / "pids.max").read_text())
                left = most - int((group / "pids.current").read_text())
                remedy = "raise it, for systemd's units with TasksMax=infinity"
                yield Limit(f"pids.max of {group}", most, left, remedy)
            group = group.parent
