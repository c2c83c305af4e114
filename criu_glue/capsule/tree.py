# SPDX-License-Identifier: Apache-2.0
"""The processes of a capsule, as the host sees them: their pids in the capsule and descriptors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import psutil

from ... import proc_text
from .sandboxes import Sandbox


def tasks(sandbox: Sandbox) -> list[psutil.Process]:
    """Every process of the sandbox below process 1."""
    try:
        return list(psutil.Process(sandbox.init).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def children_first(pids: Iterable[int]) -> list[int]:
    """Sort pids of the host so that each process comes before its parent. Processes that have ended
    come last."""
    parents = dict[int, int]()
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            parents[pid] = psutil.Process(pid).ppid()

    def depth(pid: int) -> int:
        above = parents.get(pid)
        return 0 if above is None else 1 + depth(above)

    return sorted(pids, key=depth, reverse=True)


def inner_pid(pid: int) -> int:
    """The pid inside the capsule of the task with the host's pid ``pid``.

    Raises FileNotFoundError or ProcessLookupError if the task has ended: the first when /proc has
    no such file any more, the second when it ended between our open(2) and our read(2)."""
    for line in proc_text.lines(f"/proc/{pid}/status"):
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise FileNotFoundError(f"/proc/{pid}/status names no NSpid")


def descriptors(pid: int) -> Iterator[tuple[int, str]]:
    """(number, target) of each open descriptor of the process with the host's pid ``pid``.

    Raises OSError."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")


def in_order(sandbox: Sandbox, root_pid: int) -> dict[int, int]:
    """The host's pid → the capsule's pid, in the order in which CRIU dumps the tree.

    Each process comes before its children, and children come oldest first. {} if the tree has
    ended."""
    found: dict[int, int] = {}
    try:
        children: dict[int, list[psutil.Process]] = {}
        everyone = tasks(sandbox)
        for task in sorted(everyone, key=lambda task: (task.create_time(), task.pid), reverse=True):
            children.setdefault(task.ppid(), []).append(task)
        left = [t for t in children.get(sandbox.init, ()) if inner_pid(t.pid) == root_pid]
        while left:
            task = left.pop()
            found[task.pid] = inner_pid(task.pid)
            left += children.get(task.pid, ())
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return {}
    return found
