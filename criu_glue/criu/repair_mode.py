# SPDX-License-Identifier: Apache-2.0
"""Take TCP sockets out of repair mode after a CRIU that died while it held a tree.

CRIU dumps a connection in repair mode and switches that mode off before it lets the tasks go. If
CRIU is killed in between, the sockets neither send nor receive: the tasks run, but the job hangs.
The sockets belong to the tasks, but pidfd_getfd(2) gives us duplicates. The kernel lets any process
switch TCP_REPAIR that has CAP_NET_ADMIN over the socket's namespace.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable

from ..survey.borrowed_sockets import kind, sockets

log = logging.getLogger("liveshift.criu")

_TCP_REPAIR, _ON, _OFF = 19, 1, 0  # linux/tcp.h


def leave(pids: Iterable[int]) -> int:
    """Switch repair mode off for every TCP socket of the tasks; returns how many had it on. One for
    which this fails does not keep the others from sending again."""
    mended = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for borrowed in sockets(pid):
                try:
                    mended += _leave(borrowed)
                except OSError as error:
                    log.error("a connection of process %d stays in repair mode: %s", pid, error)
    return mended


def _leave(borrowed: socket.socket) -> bool:
    # MPTCP and SCTP have no such mode.
    family, type_, protocol = kind(borrowed)
    if (type_, protocol) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
        return False
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) != _ON:
        return False
    borrowed.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF)
    return True
