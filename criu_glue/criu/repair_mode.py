# SPDX-License-Identifier: Apache-2.0
"""Take TCP sockets out of repair mode after a CRIU that died while it held a tree.

CRIU dumps a connection in repair mode and switches that mode off before it lets the tasks go. If
CRIU is killed in between, the sockets neither send nor receive: the tasks run, but the job hangs.
The sockets belong to the tasks, but pidfd_getfd(2) gives us duplicates. The kernel lets any process
switch TCP_REPAIR that has CAP_NET_ADMIN over the socket's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable, Iterator

_PIDFD_GETFD = 438  # the same number on every architecture
_TCP_REPAIR, _ON, _OFF = 19, 1, 0  # linux/tcp.h

_libc = ctypes.CDLL(None, use_errno=True)


def leave(pids: Iterable[int]) -> int:
    """Switch repair mode off for every TCP socket of the tasks; returns how many had it on."""
    mended = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                for borrowed in _sockets(pid, pidfd):
                    with borrowed:
                        mended += _leave(borrowed)
            finally:
                os.close(pidfd)
    return mended


def _leave(borrowed: socket.socket) -> bool:
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if borrowed.type != socket.SOCK_STREAM:
        return False
    if borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) != _ON:
        return False
    borrowed.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF)
    return True


def _sockets(pid: int, pidfd: int) -> Iterator[socket.socket]:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):  # the descriptor was closed, or the task has ended
                if not os.readlink(f"{directory}/{name}").startswith("socket:"):
                    continue
                fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
                if fd >= 0:
                    yield socket.socket(fileno=fd)
