# SPDX-License-Identifier: Apache-2.0
"""What /proc says about single threads. Their numbers are those of this host's pid namespace."""

from __future__ import annotations

import os
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError)


def of(pid: int) -> list[int]:
    """The threads of a process; an empty list if it has ended."""
    try:
        return list(map(int, os.listdir(f"/proc/{pid}/task")))
    except _GONE:
        return []


def state(tid: int) -> str:
    """The thread's state, one letter (proc(5)); X if the thread has ended."""
    try:
        return _status(tid, "State")[0]
    except _GONE:
        return "X"


def switches(tid: int) -> str:
    """How often the kernel has taken the thread off a processor, as text: if the text is another
    one, the thread has run. "" if the thread has ended."""
    try:
        kinds = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        return "+".join(_status(tid, kind) for kind in kinds)
    except _GONE:
        return ""


def ended(tid: int) -> bool:
    return state(tid) in "ZX"


def name(tid: int) -> str:
    return _read(tid, "comm") or "gone"


def innermost(tid: int) -> int:
    """The thread's number in its own pid namespace. Raises FileNotFoundError or
    ProcessLookupError if it has ended."""
    return int(_status(tid, "NSpid").split()[-1])


def tracer(tid: int) -> int:
    """The process that traces the thread, 0: none. (The kernel names the tracing thread.)"""
    try:
        by = int(_status(tid, "TracerPid"))
        return int(_status(by, "Tgid")) if by else 0
    except _GONE:
        return 0


def who(pid: int, tid: int) -> str:
    return f"thread {tid} ({name(tid)}) of process {pid}"


def doing(tid: int) -> str:
    """The thread's state in words, and its place in the kernel if the kernel reports it."""
    now, where = state(tid), _read(tid, "wchan")
    return f"in state {now}" + (f" in the kernel's {where}" if where not in ("", "0") else "")


def _status(tid: int, key: str) -> str:
    for line in Path(f"/proc/{tid}/status").read_text(errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return line.split(":", 1)[1].strip()
    raise FileNotFoundError(f"/proc/{tid}/status has no {key}")


def _read(tid: int, what: str) -> str:
    try:
        return Path(f"/proc/{tid}/{what}").read_text(errors="replace").strip()
    except OSError:
        return ""
