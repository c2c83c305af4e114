# SPDX-License-Identifier: Apache-2.0
"""Finds ended processes whose status CRIU alters: their parents have not waited for them yet.

CRIU makes such a process again, and has it end as the first one did. But it passes on only seven
bits of an exit code: 137 becomes 9. Signal 64 becomes SIGABRT, and a core dump is left out
(criu: cr-restore.c, restore_one_zombie and sig_fatal). We tried all codes and all signals with CRIU
4.2: the others come back as they were.
"""

from __future__ import annotations

import contextlib
import signal

import psutil

from ... import proc_text
from ..capsule.sandboxes import Sandbox
from ..capsule.tree import inner_pid, tasks

REMEDY = "the capsule can move once the parent has waited for it (waitpid(2))"

_STATE, _THREADS, _STATUS = 0, 17, 49  # of /proc/PID/stat, counted from behind the name
_LAST_SIGNAL = 64
_SIGNAL, _CORE = 0x7F, 0x80  # wait(2)


def find(sandbox: Sandbox) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each such process; [] if the capsule has ended."""
    found = []
    for task in tasks(sandbox):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            status = status_of(task.pid)
            if status is not None and (what := altered(status)):
                who = f"process {inner_pid(task.pid)} ({task.name()})"
                found.append((words(who, what), REMEDY))
    return found


def status_of(pid: int) -> int | None:
    """The status for which the parent of the process has not waited, as wait(2) gives it; None if
    the process, or a thread of it, still runs. Raises OSError."""
    fields = proc_text.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ended = fields[_STATE] == "Z" and int(fields[_THREADS]) <= 1
    return int(fields[_STATUS]) if ended else None


def altered(status: int) -> str:
    """Say how a process has ended and what CRIU makes of it; "" if CRIU leaves it as it is."""
    number = status & _SIGNAL
    if number == 0:
        code = status >> 8
        other = code & 0x7F
        return _how(f"with code {code}", f"code {other}") if code != other else ""
    if number >= _LAST_SIGNAL:
        return _how(f"by signal {number}", f"signal {signal.SIGABRT:d}")
    if status & _CORE:
        return _how(f"by signal {number} with a core dump", "an end without one")
    return ""


def words(who: str, what: str) -> str:
    return f"{who} has ended {what}"


def _how(ended: str, other: str) -> str:
    return f"{ended}, and its parent has not waited for it: CRIU would make {other} of that"
