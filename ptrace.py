# SPDX-License-Identifier: Apache-2.0
"""The ptrace(2) requests that stop a thread and let it go on, unnoticed by the thread.

A tracer is a thread, not a process: every call about a tracee must come from the thread that
seized it. When that thread ends, the kernel detaches all its tracees (or kills them, with
PTRACE_O_EXITKILL).
"""

from __future__ import annotations

import ctypes
import os

EXITKILL = 0x00100000  # linux/ptrace.h
_CONT, _DETACH, _SETOPTIONS, _SEIZE, _INTERRUPT = 7, 17, 0x4200, 0x4206, 0x4207
_EVENT_STOP = 128
_OWN_TRACEES = 0x40000000 | 0x20000000  # __WALL, and __WNOTHREAD: no other thread's children

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def seize(tid: int) -> None:
    """Make the calling thread the tracer of ``tid``, which keeps running. Raises OSError: ESRCH if
    ``tid`` has ended; EPERM if it has a tracer, is a zombie, or the caller lacks the right."""
    _call(_SEIZE, tid)


def interrupt(tid: int) -> None:
    """Make the tracee trap before its next user instruction. The kernel restarts an interrupted
    system call later."""
    _call(_INTERRUPT, tid)


def resume(tid: int, signum: int) -> None:
    _call(_CONT, tid, signum)


def set_options(tid: int, options: int) -> None:
    _call(_SETOPTIONS, tid, options)


def detach(tid: int) -> None:
    """Detach from a tracee; raises ProcessLookupError if it has ended or is not stopped."""
    _call(_DETACH, tid)


class TraceeEnded:
    """A tracee has ended."""


class Trapped:
    """A tracee has stopped, and the tracer has no signal to deliver to it."""


class Delivery:
    """A tracee has stopped before a signal; the tracer must pass the signal on."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def next_event() -> tuple[int, TraceeEnded | Trapped | Delivery] | None:
    """Return the next pending event of a tracee of the calling thread; None if there is none."""
    try:
        tid, status = os.waitpid(-1, os.WNOHANG | _OWN_TRACEES)
    except ChildProcessError:  # no tracee at all
        return None
    if tid == 0:
        return None
    if not os.WIFSTOPPED(status):
        return tid, TraceeEnded()
    if status >> 16 == _EVENT_STOP:
        return tid, Trapped()
    return tid, Delivery(os.WSTOPSIG(status))


def _call(request: int, tid: int, data: int = 0) -> None:
    if _libc.ptrace(request, tid, None, data or None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"thread {tid}")
