# SPDX-License-Identifier: Apache-2.0
"""Sockets in the network namespace of another process."""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def netlink(pid: int, protocol: int) -> socket.socket:
    """A socket that speaks with the kernel about the network namespace of ``pid``; raises
    OSError."""
    return socket_inside(pid, socket.AF_NETLINK, socket.SOCK_RAW, protocol)


def socket_inside(pid: int, family: int, kind: int, protocol: int) -> socket.socket:
    """A socket in the network namespace of ``pid``; raises OSError.

    The thread enters the namespace only while it opens the socket there. The namespace lasts at
    least as long as the socket."""
    with open("/proc/thread-self/ns/net") as home, open(f"/proc/{pid}/ns/net") as there:
        _enter(there.fileno())
        try:
            return socket.socket(family, kind, protocol)
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
