# SPDX-License-Identifier: Apache-2.0
"""Opens, from outside, a userfaultfd of a process that tracks what the process writes.

A userfaultfd belongs to the address space of the process that makes it. So one thread of the
process must make it. The agent traps that thread for some 100 µs; for the thread this is like a
signal that it ignores. The thread runs two system calls, and the agent takes the descriptor by
pidfd_getfd(2). Nothing stays in the process. When the agent ends, the kernel takes everything back.

The process needs no privilege: the userfaultfd never stops a thread at a fault. With
UFFD_FEATURE_WP_ASYNC (Linux 6.7) the kernel lifts the protection at the first write by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .... import ptrace
from ..engine import load
from . import source_engine
from .maps import vdso
from .proc import about, state, status

STOP_S = 0.5
"""A thread must trap within this many seconds."""

ATTEMPTS = 5

DECLARATIONS = "int remote_userfaultfd(int tid, int pidfd, uint64_t syscall_at, bool filtered);"

_, _lib = load(DECLARATIONS)

_SYSCALL = b"\x0f\x05"  # the x86-64 instruction
_UNRESTARTED = frozenset({"23", "65", "128", "208", "220", "232", "281", "333", "441"})
"""An interruption ends these x86-64 system calls early or with EINTR: epoll_wait, semop …"""
_USERFAULTFD = 323
_USER_MODE_ONLY = 1


class Untrackable(Exception):
    """The writes of a process cannot be tracked. Its text is the reason."""


def open_in(pid: int) -> int:
    """Return a userfaultfd of the process. It is ready to track writes, and close-on-exec.

    Raises Untrackable, or ProcessLookupError when the process has ended.
    """
    # This is a thread of its own: when it ends, the kernel detaches it from the process that it
    # traces, also after an error.
    with ThreadPoolExecutor(1, "userfaultfd") as thread:
        uffd = thread.submit(_open_traced, pid).result()
    try:
        source_engine.prepare(uffd)
    except OSError as error:
        os.close(uffd)
        raise Untrackable(f"the kernel cannot track its writes: {error.strerror}") from error
    return uffd


def probe() -> str:
    """Return why this kernel cannot track writes, in words, or "". It tests this process itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.uname().machine != "x86_64":
        return f"liveshift cannot follow memory on {os.uname().machine} yet"
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    uffd = libc.syscall(_USERFAULTFD, flags)
    if uffd < 0:
        return f"{_kernel()} gives no userfaultfd: {os.strerror(ctypes.get_errno())}"
    try:
        source_engine.prepare(uffd)
        if not source_engine.known_categories():
            return f"{_kernel()} has no PAGEMAP_SCAN, 6.7 has it"
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _try(uffd, pagemap)
        finally:
            os.close(pagemap)
    except OSError as error:
        return f"{_kernel()} cannot track writes, 6.7 can: {error.strerror}"
    finally:
        os.close(uffd)


def _kernel() -> str:
    return f"Linux {os.uname().release}"


def _try(uffd: int, pagemap: int) -> str:
    """Return "" if a scan lists exactly the written pages, else the reason in words."""
    sent, written = source_engine.Sent(), source_engine.Regions()
    with mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[0] = memory[mmap.PAGESIZE] = 1
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ranges = [(pointer, pointer + 2 * mmap.PAGESIZE)]
        seen = []
        for _ in range(3):
            written.clear()
            source_engine.scan_written(pagemap, uffd, ranges, False, sent, written)
            seen.append(written.runs())
            memory[mmap.PAGESIZE] = 2
    second = struct.pack("<QQ", pointer + mmap.PAGESIZE, 1)
    expected = [struct.pack("<QQ", pointer, 2), second, second]
    return "" if seen == expected else "PAGEMAP_SCAN does not see what is written"


def _open_traced(pid: int) -> int:
    who = about(pid)
    pidfd = os.pidfd_open(pid)
    try:
        for attempt in range(ATTEMPTS):
            # Each attempt looks again: the process may have run another program, whose vdso lies
            # elsewhere. If it does so before its thread is trapped, remote.c sees that no `syscall`
            # instruction lies at the address any more, and the attempt gives EAGAIN.
            if at := _syscall_instruction(pid):
                fd = _try_thread(pid, _best_thread(pid), pidfd, at, who.filtered)
                if fd != -errno.EAGAIN:
                    break
            time.sleep(0.001 * (attempt + 1))
        else:
            fd = -errno.EAGAIN if at else -errno.ENODATA
    finally:
        os.close(pidfd)
    if fd >= 0:
        return fd
    if fd == -errno.ESRCH and not os.path.exists(f"/proc/{pid}"):
        raise ProcessLookupError(errno.ESRCH, "it has ended", str(pid))
    raise Untrackable(_words(fd))


def _try_thread(pid: int, tid: int, pidfd: int, at: int, filtered: bool) -> int:
    """Return the descriptor, or -errno. Raises Untrackable."""
    try:
        ptrace.seize(tid)
        ptrace.interrupt(tid)
        if not _trapped(tid):
            raise Untrackable(f"its thread {tid} does not stop")
        fd = int(_lib.remote_userfaultfd(tid, pidfd, at, filtered))
        with contextlib.suppress(ProcessLookupError):
            ptrace.detach(tid)
        return fd
    except ProcessLookupError:
        return -errno.EAGAIN if os.path.exists(f"/proc/{pid}") else -errno.ESRCH
    except PermissionError as refused:
        tracer = _tracer(tid)
        why = f"process {tracer} traces it" if tracer else "the kernel does not permit it"
        raise Untrackable(why) from refused


def _trapped(tid: int) -> bool:
    until = time.monotonic() + STOP_S
    while time.monotonic() < until:
        event = ptrace.next_event()
        if event is None:
            time.sleep(0.00005)
        elif isinstance(event[1], ptrace.Delivery):
            ptrace.resume(tid, event[1].signum)
        elif isinstance(event[1], ptrace.TraceeEnded):
            raise ProcessLookupError(errno.ESRCH, "it has ended", str(tid))
        else:
            return True
    return False


def _best_thread(pid: int) -> int:
    """Return the thread that is disturbed the least: it computes, or its system call restarts."""
    ranked = []
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            now = state(pid, int(name))
            call = Path(f"/proc/{pid}/task/{name}/syscall").read_text().split()[0]
            if now not in "ZX":
                cost = (now == "D", call in _UNRESTARTED, call != "running")
                ranked.append((cost, int(name)))
    if not ranked:
        raise ProcessLookupError(errno.ESRCH, "it has ended", str(pid))
    return min(ranked)[1]


def _syscall_instruction(pid: int) -> int | None:
    """Return the address of a ``syscall`` instruction in the process's vdso, or None.

    None is normal during an execve(2). Then, for example, the list of mappings was the old
    program's, and the memory is already the new program's.
    """
    where = vdso(pid)
    if where is None:
        return None
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(where[0])
        try:
            found = memory.read(where[1] - where[0]).find(_SYSCALL)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None
    return where[0] + found if found >= 0 else None


def _tracer(tid: int) -> int:
    with contextlib.suppress(OSError):
        return int(status(tid).get(b"TracerPid", [b"0"])[0])
    return 0


def _words(number: int) -> str:
    known = {
        errno.ENOEXEC: "it does not run 64-bit code",
        errno.EACCES: "its seccomp filter cannot be suspended",
        errno.EAGAIN: "its threads cannot be disturbed",
        errno.ENODATA: "it has no vdso that makes system calls",
        errno.EPERM: "the kernel gives it no userfaultfd",
        errno.ENOSYS: "the kernel has no userfaultfd",
    }
    return known.get(-number) or f"no userfaultfd could be made in it: {os.strerror(-number)}"
