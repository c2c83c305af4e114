# SPDX-License-Identifier: Apache-2.0
"""Waits until CRIU has stopped every thread of some processes, and sees that from outside."""

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
    tasks: Callable[[], Sequence[int]],
    until: float,
    given_up: Callable[[], bool] = lambda: False,
    known: Callable[[], bool] = lambda: False,
) -> None:
    """Return once every thread of ``tasks()`` was seen in a tracing stop of CRIU's.

    Raises TimeoutError at ``until`` (monotonic seconds) or once ``given_up`` is true. The error
    names a thread that was not seen stopped.

    CRIU stops the threads one by one and keeps hold of them: after that they run CRIU's own code
    only. Other tracers, for example a profiler, stop threads as well, but let them go on. Once each
    thread was seen stopped, and no new thread has appeared meanwhile, no code of the program runs
    any more. On a busy host a thread may run CRIU's code so soon after its stop that it is never
    seen stopped. Then ``known`` ends the wait: CRIU itself reports that all are stopped.
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
    """Whether the process is our CRIU, by the arguments that held.py starts it with. Its name does
    not show that: where the loader starts CRIU, the name is the loader's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"--action-script" in words and b"dump" in words
