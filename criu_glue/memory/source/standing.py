# SPDX-License-Identifier: Apache-2.0
"""Seeing from outside that every thread of some processes has been stopped by CRIU."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 0.001

_STATE = re.compile(rb"^State:\t(.)", re.MULTILINE)
_TRACER = re.compile(rb"^TracerPid:\t(\d+)$", re.MULTILINE)
_ENDED = (b"Z", b"X")


def wait_stopped(
    tasks: Callable[[], Sequence[int]], until: float, given_up: Callable[[], bool] = lambda: False,
    known: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Return once every thread of ``tasks()`` was seen in a tracing stop of CRIU's, at ``until``
    (monotonic seconds), or once it is given up, raise TimeoutError, naming one that was not.

    CRIU stops them one by one and then keeps its hands on them all: what it lets run after that is
    its own code. Others, a profiler say, stop them as well and let them go on. Once each thread
    there is has been seen to stand, and no other has appeared meanwhile, nothing of the program's
    runs any more. A thread that runs CRIU's code soon after it was stopped may never be seen
    standing where processors are busy; then it is CRIU that tells (``known``).
    """
    seen: set[tuple[int, int]] = set()
    while not known():
        now = _threads(tasks())
        waiting = [thread for thread in now if thread not in seen and not _stands(*thread)]
        seen.update(now.difference(waiting))
        if now and not waiting and _threads(tasks()) <= seen:
            return
        if time.monotonic() > until or given_up():
            pid, tid = waiting[0] if waiting else (0, 0)
            raise TimeoutError(f"thread {tid} of process {pid} was not stopped")
        time.sleep(LOOK_S)


def _threads(pids: Sequence[int]) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update((pid, int(tid)) for tid in os.listdir(f"/proc/{pid}/task"))
    return found


def _stands(pid: int, tid: int) -> bool:
    try:
        about = Path(f"/proc/{pid}/task/{tid}/status").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, tracer = _STATE.search(about), _TRACER.search(about)
    if state is None or tracer is None or state[1] in _ENDED:
        return True
    return state[1] == b"t" and _is_criu(tracer[1].decode())


def _is_criu(pid: str) -> bool:
    """By how we start it (held.py): its name is the loader's where it is started by that."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"--action-script" in words and b"dump" in words
