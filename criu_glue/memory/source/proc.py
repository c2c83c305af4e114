# SPDX-License-Identifier: Apache-2.0
"""Reads from proc(5) about a task, which is a process or one of its threads.

All functions raise FileNotFoundError or ProcessLookupError when the task has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class About:
    """Facts about one process. ``started`` (clock ticks since boot) distinguishes it from a later
    process with the same pid. ``inner`` is its pid in the capsule, ``parent`` its parent's pid on
    the host."""

    inner: int
    parent: int
    started: int
    state: str
    locked: bool
    """Whether some of its memory is locked (mlock(2))."""
    filtered: bool
    """Whether it has a seccomp(2) filter."""


def about(pid: int) -> About:
    stat = _stat(f"{pid}")
    fields = status(pid)
    return About(
        inner=int(fields[b"NSpid"][-1]),
        parent=int(stat[1]),
        started=int(stat[19]),
        state=stat[0].decode(),
        locked=fields.get(b"VmLck", [b"0"])[0] != b"0",
        filtered=fields.get(b"Seccomp", [b"0"])[0] != b"0",
    )


def status(tid: int) -> dict[bytes, list[bytes]]:
    """Return the fields of the task's status file, each value split into words."""
    fields = {}
    for line in Path(f"/proc/{tid}/status").read_bytes().splitlines():
        key, _, value = line.partition(b":")
        fields[key] = value.split()
    return fields


def state(pid: int, tid: int) -> str:
    """Return the letter that stands for a thread's state."""
    return _stat(f"{pid}/task/{tid}")[0].decode()


def _stat(task: str) -> list[bytes]:
    """Return the fields behind the task's name. The name itself may contain any characters."""
    return Path(f"/proc/{task}/stat").read_bytes().rpartition(b")")[2].split()
