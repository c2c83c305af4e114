# SPDX-License-Identifier: Apache-2.0
"""What /proc says about single threads. Their numbers are those of this host's pid namespace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from .. import proc_text
from ..errors import StepFailed

_GONE = (FileNotFoundError, ProcessLookupError)

LOOKS = 10
"""A thread is looked at so often before it is said to have slept all the time."""


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


def run_so_far(tid: int) -> str:
    """How long the thread has run, and how often the kernel has taken it off a processor, as text:
    if the text is another one, the thread has run. "" for a thread that does not sleep now."""
    try:
        if state(tid) not in "StT":
            return ""
        kinds = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        switches = "+".join(_status(tid, kind) for kind in kinds)
        return f"{_read(tid, 'schedstat').split(maxsplit=1)[:1]} {switches}"
    except _GONE:
        return ""


def asleep(tids: Iterable[int], seconds: float) -> set[int]:
    """Wait for so many seconds, and return the threads that have slept all the time.

    They are looked at LOOKS times. If the whole machine stands still meanwhile, as a virtual one
    may, a thread that waits for another one for a moment only runs before the next look.
    """
    seen = {tid: run_so_far(tid) for tid in tids}
    for _ in range(LOOKS):
        time.sleep(seconds / LOOKS)
        seen = {tid: before for tid, before in seen.items() if before == run_so_far(tid) != ""}
    return set(seen)


def ended(tid: int) -> bool:
    return state(tid) in "ZX"


def stop(pid: int, timeout_s: float) -> None:
    """Stop (SIGSTOP) a process some of whose threads are held: they run no instruction either when
    they are released. Raises StepFailed if the process has ended, or does not stop within
    ``timeout_s``; then no stop is pending."""
    until = time.monotonic() + timeout_s
    try:
        os.kill(pid, signal.SIGSTOP)
        while not stopped(pid):  # a thread that is not held has to take note of the signal
            if ended(pid):
                raise ProcessLookupError
            if time.monotonic() > until:
                os.kill(pid, signal.SIGCONT)
                raise StepFailed("hold", f"process {pid} did not stop within {timeout_s:g} s")
            time.sleep(0.0005)
    except ProcessLookupError:
        raise StepFailed("hold", f"process {pid} ended before it was stopped") from None


def stopped(pid: int) -> bool:
    """Whether a thread of the process is stopped by a signal, not only by a tracer."""
    return any(state(tid) == "T" for tid in of(pid))


def name(tid: int) -> str:
    return _read(tid, "comm") or "gone"


def innermost(tid: int) -> int:
    """The thread's number in its own pid namespace. Raises FileNotFoundError or
    ProcessLookupError if it has ended."""
    return int(_status(tid, "NSpid").split()[-1])


def system_call(tid: int) -> int:
    """The number of the system call in which a thread waits or was stopped; -1 if it is in none, or
    runs, or has ended."""
    first = _read(tid, "syscall").split(maxsplit=1)
    return int(first[0]) if first and first[0].lstrip("-").isdigit() else -1


def registers(tid: int) -> tuple[int, int] | None:
    """The stack pointer and the program counter of a thread that waits or is stopped; None if it
    runs, or has ended (proc(5): syscall)."""
    words = _read(tid, "syscall").split()
    return (int(words[-2], 16), int(words[-1], 16)) if len(words) >= 3 else None


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
    for line in proc_text.lines(f"/proc/{tid}/status"):
        if line.startswith(f"{key}:"):
            return line.split(":", 1)[1].strip()
    raise FileNotFoundError(f"/proc/{tid}/status has no {key}")


def _read(tid: int, what: str) -> str:
    try:
        return proc_text.read(f"/proc/{tid}/{what}").strip()
    except OSError:
        return ""
