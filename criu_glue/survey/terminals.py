# SPDX-License-Identifier: Apache-2.0
"""Which of a capsule's terminals CRIU could not dump or restore.

A capsule has a devpts of its own, so the numbers of its pseudo-terminals are free at a destination.
CRIU opens masters until it has the number that it wants, 32 of them at most; it dumps an open
``/dev/tty`` only where nobody else has that terminal, and then its master is not in the capsule
(criu: tty.c, __pty_open_ptmx_index, tty_verify_ctty).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..capsule.tree import descriptors

AT_ONCE = 32
"""Masters that CRIU opens to come to one of a certain number."""

Trouble = tuple[str, str]


def of_task(pid: int, who: str) -> Iterator[Trouble]:
    """What of a task's terminals stands in the way of a move."""
    if any(target == "/dev/tty" for _, target in descriptors(pid)):
        yield (
            f"{who} holds /dev/tty, which CRIU cannot dump",
            "close it, or open the terminal by its own name (ttyname(3))",
        )


def of_room(root: Path) -> Iterator[Trouble]:
    """The same of all terminals that there are in a room."""
    there = sorted(int(name) for name in os.listdir(root / "dev/pts") if name.isdigit())
    for free, number in enumerate(there):
        if number - free >= AT_ONCE:
            yield (
                f"the capsule holds the terminal /dev/pts/{number} and only {free} below it, which"
                " CRIU cannot restore",
                "end programs that hold terminals, or have them open theirs anew",
            )
            return
