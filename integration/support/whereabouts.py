# SPDX-License-Identifier: Apache-2.0
"""Where a capsule's processes really run: read from this machine's /proc, not from any status.

A lab host is a pid namespace; what runs on it is in that namespace or below it. A capsule's
processes have its name in their environment, which moves with them.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from liveshift.launcher.lab import Lab

_NS_GET_PARENT = 0xB702  # ioctl_ns(2)
_VARIABLE = b"LIVESHIFT_CAPSULE="

GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""It has ended meanwhile; or it has capabilities that we lack, so no lab of ours started it."""

Tasks = dict[int, int]
"""Pids as the capsule sees them → as this machine does."""


def where(lab: Lab, capsule: str) -> dict[str, Tasks]:
    """The lab hosts that have processes of the capsule, and these processes."""
    hosts = {_space(m.init.pid): m.name for m in lab.machines if m.init is not None}
    found: dict[str, Tasks] = {}
    for pid in every_pid():
        with suppress(*GONE):
            inner = inner_pid(pid)
            if inner == 1 or not _is_of(pid, capsule):
                continue  # process 1 belongs to the sandbox, which stays
            for space in spaces(pid):
                if space in hosts:
                    found.setdefault(hosts[space], {})[inner] = pid
    return found


def on_lab(lab: Lab) -> set[tuple[int, int]]:
    """Every process of the lab, as (pid, start time), told by its pid namespaces."""
    hosts = {_space(m.init.pid) for m in lab.machines if m.init is not None}
    found = set()
    for pid in every_pid():
        with suppress(*GONE):
            if hosts & set(spaces(pid)):
                found.add((pid, started(pid)))
    return found


def every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def inner_pid(pid: int) -> int:
    """The pid that a process has in its own, innermost namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its pid, its identity."""
    return int(_stat(pid)[19])


def runs(pid: int, since: int) -> bool:
    """Does this very process still run? A zombie does not: its parent has yet to look."""
    with suppress(*GONE):
        return started(pid) == since and _stat(pid)[0] != "Z"
    return False


def owners(tasks: Tasks) -> set[int]:
    """The real user ids of processes."""
    return {os.stat(f"/proc/{pid}").st_uid for pid in tasks.values()}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _is_of(pid: int, capsule: str) -> bool:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return _VARIABLE + capsule.encode() in words


def _space(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def spaces(pid: int) -> list[int]:
    """The pid namespaces a process is in, from its own outwards; ours is left out."""
    found: list[int] = []
    ours = _space(os.getpid())
    fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
    while (space := os.fstat(fd).st_ino) != ours:
        found.append(space)
        try:
            parent = fcntl.ioctl(fd, _NS_GET_PARENT)
        except PermissionError:  # it is outside of ours
            break
        os.close(fd)
        fd = parent
    os.close(fd)
    return found
