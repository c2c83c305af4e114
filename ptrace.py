# SPDX-License-Identifier: Apache-2.0
"""The few requests of ptrace(2) that stop a thread without a trace of it, and let it go again.

A tracer is a thread: every call about a tracee must come from the thread that has seized it, and
the kernel lets all its tracees go (or kills them, PTRACE_O_EXITKILL) when that thread ends.
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
    """Become a thread's tracer; it goes on. Raises OSError: ESRCH when it has gone, EPERM when it
    has a tracer already, is a zombie, or we may not."""
    _call(_SEIZE, tid)


def interrupt(tid: int) -> None:
    """Let it trap before its next instruction of its own; system calls are restarted later."""
    _call(_INTERRUPT, tid)


def resume(tid: int, signum: int) -> None:
    _call(_CONT, tid, signum)


def set_options(tid: int, options: int) -> None:
    _call(_SETOPTIONS, tid, options)


def detach(tid: int) -> None:
    """Raises ProcessLookupError also for a tracee that has not stopped."""
    _call(_DETACH, tid)


class Ended:
    """A tracee has ended."""


class Trapped:
    """A tracee stands still; no signal is in our hands."""


class Delivery:
    """A tracee stands before a signal that is ours to hand on."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def next_event() -> tuple[int, Ended | Trapped | Delivery] | None:
    """What the calling thread has not yet been told of one of its tracees; None: nothing now."""
    try:
        tid, status = os.waitpid(-1, os.WNOHANG | _OWN_TRACEES)
    except ChildProcessError:  # no tracee at all
        return None
    if tid == 0:
        return None
    if not os.WIFSTOPPED(status):
        return tid, Ended()
    if status >> 16 == _EVENT_STOP:
        return tid, Trapped()
    return tid, Delivery(os.WSTOPSIG(status))


def _call(request: int, tid: int, data: int = 0) -> None:
    if _libc.ptrace(request, tid, None, data or None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"thread {tid}")
