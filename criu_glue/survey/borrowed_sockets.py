# SPDX-License-Identifier: Apache-2.0
"""Looks at the sockets of other processes, by duplicating their descriptors."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ..capsule.tree import descriptors
from ..files.lent import lent

_SO_TYPE, _SO_PROTOCOL, _SO_DOMAIN = 3, 38, 39  # asm-generic/socket.h


def sockets(pid: int) -> Iterator[socket.socket]:
    """A duplicate of each socket of the process with the host's pid ``pid``; each is closed when
    the next one is taken. Ask :func:`kind` what it is: here each has the family AF_UNIX. Without a
    family Python would ask getsockname(2), which AF_XDP and others do not have.

    Raises OSError if the process has ended.
    """
    for fd, target in descriptors(pid):
        if target.startswith("socket:"):
            try:
                duplicate = lent(pid, fd)
            except OSError:  # it was closed, or the task has ended
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, duplicate) as borrowed:
                yield borrowed


def kind(borrowed: socket.socket) -> tuple[int, int, int]:
    """Its family, type and protocol."""
    options = (_SO_DOMAIN, _SO_TYPE, _SO_PROTOCOL)
    family, type_, protocol = (borrowed.getsockopt(socket.SOL_SOCKET, each) for each in options)
    return family, type_, protocol
