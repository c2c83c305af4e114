# SPDX-License-Identifier: Apache-2.0
"""A process that does with its memory what a test tells it, line by line of Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from waits import until

MANY = 2048
"""Pages of the subject's ``memory``: 8 MiB."""

_PROGRAM = f"""
import ctypes, mmap, os, signal, sys, threading, time
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
memory = mmap.mmap(-1, {MANY} * 4096, flags=PRIVATE)
def put(page, value, of=memory):
    of[page * 4096:(page + 1) * 4096] = value.to_bytes(8, "little") * 512
def address(of=memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(of))
for page in range({MANY}): put(page, page + 1)
known = globals()
def serve(orders, answers):
    for line in orders:
        try: answer = eval(line, known)
        except SyntaxError: answer = exec(line, known)
        print(answer, file=answers, flush=True)
serve(sys.stdin, sys.stdout)
"""


class Subject:
    """The process; everything it is told has been done when it is told the next."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def do(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"it ended at: {line}"
        return answer.rstrip("\n")

    def number(self, line: str) -> int:
        return int(self.do(line))

    @contextmanager
    def standing(self, *others: int) -> Iterator[None]:
        """It and the others are frozen meanwhile, as to the memory."""
        for pid in (self.pid, *others):
            os.kill(pid, signal.SIGSTOP)
            until(lambda: state(pid) == "T")  # noqa: B023 - called in this turn only
        yield
        for pid in (self.pid, *others):
            os.kill(pid, signal.SIGCONT)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def subject() -> Iterator[Subject]:
    """One in a session of its own, which ends with all that it has forked."""
    with subprocess.Popen(
        [sys.executable, "-Sc", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        started = Subject(process)
        try:
            assert started.do("1 + 1") == "2"
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            until(lambda: not _running(process.pid))


def _running(group: int) -> list[int]:
    """Those of a process group that have not ended. By the group: who has lost its parent is
    nobody's child that could be found."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getpgid(pid) == group and state(pid) not in "ZX":
                found.append(pid)
    return found


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


Pids = Callable[[], list[int]]


def family(pid: int) -> Pids:
    """It and its children, the living and the dead."""
    return lambda: [pid, *_children(pid)]
