# SPDX-License-Identifier: Apache-2.0
"""Finds a capsule's terminals that CRIU could not dump or restore.

A capsule has its own devpts, so the numbers of its pseudo-terminals are free at a destination. To
get a certain number, CRIU opens masters until it has that one, at most 32. It dumps no number above
1000, as its images name other kinds of terminals by these. CRIU dumps an open ``/dev/tty`` only if
no other process has that terminal open; but then the terminal's master is not in the capsule (criu:
tty.c, __pty_open_ptmx_index, pts_fd_get_index, tty_verify_ctty).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..capsule.tree import descriptors

AT_ONCE = 32
"""CRIU opens at most this many masters to get the one with a certain number."""

HIGHEST = 1000
"""CRIU dumps no terminal with a higher number."""

Problem = tuple[str, str]


def of_task(pid: int, who: str) -> Iterator[Problem]:
    """(what prevents a move, what to do) for the terminals of one task."""
    if any(target == "/dev/tty" for _, target in descriptors(pid)):
        yield (
            f"{who} holds /dev/tty, which CRIU cannot dump",
            "close it, or open the terminal by its own name (ttyname(3))",
        )


def of_sandbox(root: Path) -> Iterator[Problem]:
    """(what prevents a move, what to do) for all terminals of a sandbox."""
    there = sorted(int(name) for name in os.listdir(root / "dev/pts") if name.isdigit())
    if there and there[-1] > HIGHEST:
        yield (
            f"the capsule holds the terminal /dev/pts/{there[-1]}, and CRIU dumps none above"
            f" {HIGHEST}",
            "end programs that hold terminals, or have them open theirs again",
        )
        return
    for free, number in enumerate(there):
        if number - free >= AT_ONCE:
            yield (
                f"the capsule holds the terminal /dev/pts/{number} and only {free} below it, which"
                " CRIU cannot restore",
                "end programs that hold terminals, or have them open theirs again",
            )
            return
