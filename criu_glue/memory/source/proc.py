# SPDX-License-Identifier: Apache-2.0
"""What proc(5) says of a task: a process, or one of its threads.

All functions raise FileNotFoundError or ProcessLookupError when it has gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class About:
    """Who a process is: ``started`` (clock ticks since boot) tells it from a later one of its pid.
    ``inner`` and ``parent`` are pids; ``inner`` is the capsule's, the other the host's."""

    inner: int
    parent: int
    started: int
    state: str
    locked: bool
    """Some of its memory is (mlock(2))."""
    filtered: bool
    """By seccomp(2)."""


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
    """The fields of its status file, each in words."""
    fields = {}
    for line in Path(f"/proc/{tid}/status").read_bytes().splitlines():
        key, _, value = line.partition(b":")
        fields[key] = value.split()
    return fields


def state(pid: int, tid: int) -> str:
    """Of a thread, the letter."""
    return _stat(f"{pid}/task/{tid}")[0].decode()


def _stat(task: str) -> list[bytes]:
    """What comes behind its name, which may hold anything."""
    return Path(f"/proc/{task}/stat").read_bytes().rpartition(b")")[2].split()
