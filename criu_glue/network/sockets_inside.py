# SPDX-License-Identifier: Apache-2.0
"""Sockets in the network namespace of another process."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def netlink(where: int | Path, protocol: int) -> socket.socket:
    """A socket that speaks with the kernel about a network namespace; as :func:`socket_inside`."""
    return socket_inside(where, socket.AF_NETLINK, socket.SOCK_RAW, protocol)


def socket_inside(where: int | Path, family: int, kind: int, protocol: int) -> socket.socket:
    """A socket in a network namespace; ``where``: a process in it, or its file. Raises OSError.

    The thread enters the namespace only while it opens the socket there. The namespace lasts at
    least as long as the socket."""
    file = where if isinstance(where, Path) else Path(f"/proc/{where}/ns/net")
    with open("/proc/thread-self/ns/net") as home, open(file) as there:
        _enter(there.fileno())
        try:
            return socket.socket(family, kind, protocol)
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
