# SPDX-License-Identifier: Apache-2.0
"""Says in words where the threads of a rank are, to explain why a job reaches no boundary.

The interposer page shows the threads at the gate; the kernel shows the others (/proc/<pid>/task,
proc(5)). ``wchan`` and ``syscall`` need CAP_SYS_PTRACE; without it they show less.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import proc_text
from ...texts import one_line

# System call numbers from the kernel's tables; other numbers are shown as they are.
_CALLS = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        23: "select",
        35: "nanosleep",
        42: "connect",
        43: "accept",
        44: "sendto",
        45: "recvfrom",
        46: "sendmsg",
        47: "recvmsg",
        61: "wait4",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        247: "waitid",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait",
        63: "read",
        64: "write",
        72: "pselect6",
        73: "ppoll",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        203: "connect",
        206: "sendto",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        260: "wait4",
    },
}.get(os.uname().machine, {})

_STATES = {"R": "running", "S": "asleep", "D": "in the kernel", "T": "stopped", "t": "traced"}


@dataclass(frozen=True, slots=True)
class ThreadPlace:
    """Where a thread is. ``tid``: its gettid() in the capsule; ``where``: "asleep in futex"."""

    tid: int
    name: str
    where: str


def places(
    host_pid: int | None, at_gate: Mapping[int, str], first: Collection[int] = ()
) -> list[ThreadPlace]:
    """Return the threads of a process: first those at the gate, then ``first``, then the others.

    ``at_gate`` and ``first`` name threads by gettid() in the capsule. ``host_pid`` is the process's
    pid in our pid namespace; if it is None, or the process has ended, only ``at_gate`` is shown.
    """
    found: dict[int, ThreadPlace] = {}
    if host_pid is not None:
        tasks = Path(f"/proc/{host_pid}/task")
        try:
            tids = sorted(int(name) for name in os.listdir(tasks))
        except OSError:
            tids = []
        for tid in tids:
            place = _place(tasks / str(tid), at_gate)
            if place is not None:
                found[place.tid] = place
    for tid, where in at_gate.items():
        if tid not in found:
            found[tid] = ThreadPlace(tid, "?", where)
    main = min(found, default=0)
    order = sorted(found, key=lambda t: (t not in at_gate, t not in first, t != main, t))
    return [found[tid] for tid in order]


def _place(task: Path, at_gate: Mapping[int, str]) -> ThreadPlace | None:
    """Return the place of one thread; None if it has ended meanwhile."""
    try:
        status = proc_text.lines(task / "status")
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    tid = int(fields.get("NSpid", fields.get("Pid", "0")).split()[-1])
    name = one_line(fields.get("Name", "?"))
    if tid in at_gate:
        return ThreadPlace(tid, name, at_gate[tid])
    letter = fields.get("State", "?")[:1]
    where = _STATES.get(letter, f"state {letter}")
    call = _read(task / "syscall").split(" ", 1)[0]
    if call.isdecimal():
        where += f" in {_CALLS.get(int(call), f'system call {call}')}"
    waits = _read(task / "wchan")
    if waits not in ("", "0"):
        where += f" ({waits})"
    return ThreadPlace(tid, name, where)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
