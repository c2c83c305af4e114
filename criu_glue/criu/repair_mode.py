# SPDX-License-Identifier: Apache-2.0
"""Take TCP sockets out of repair mode after a CRIU that died while it held a tree.

CRIU dumps a connection in repair mode and switches that mode off before it lets the tasks go. If
CRIU is killed in between, the sockets neither send nor receive: the tasks run, but the job hangs.
The sockets belong to the tasks, but pidfd_getfd(2) gives us duplicates. The kernel lets any process
switch TCP_REPAIR that has CAP_NET_ADMIN over the socket's namespace.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from ..capsule.tree import descriptors
from ..files.lent import lent

_TCP_REPAIR, _ON, _OFF = 19, 1, 0  # linux/tcp.h


def leave(pids: Iterable[int]) -> int:
    """Switch repair mode off for every TCP socket of the tasks; returns how many had it on."""
    mended = 0
    for pid in pids:
        for borrowed in _sockets(pid):
            with borrowed:
                mended += _leave(borrowed)
    return mended


def _leave(borrowed: socket.socket) -> bool:
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if borrowed.type != socket.SOCK_STREAM:
        return False
    try:
        if borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) != _ON:
            return False
    except OSError:  # it is no TCP but MPTCP or SCTP, which has no such mode (EOPNOTSUPP)
        return False
    borrowed.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF)
    return True


def _sockets(pid: int) -> Iterator[socket.socket]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd, target in descriptors(pid):
            if target.startswith("socket:"):
                with contextlib.suppress(OSError):  # it was closed, or the task has ended
                    yield socket.socket(fileno=lent(pid, fd))
