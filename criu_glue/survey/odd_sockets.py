# SPDX-License-Identifier: Apache-2.0
"""Finds sockets of kinds that CRIU cannot dump.

CRIU knows UNIX, packet and netlink sockets, and of the Internet's TCP, UDP, UDP-Lite and raw ones
(criu: sockets.c, sk-inet.c). Programs in Go listen by Multipath TCP since Go 1.24, without having
asked for it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from ..capsule.tree import descriptors
from ..files.lent import lent

_SO_TYPE, _SO_PROTOCOL, _SO_DOMAIN = 3, 38, 39  # asm-generic/socket.h
_MPTCP, _UDPLITE = 262, 136  # linux/in.h
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_FAMILIES = (socket.AF_UNIX, socket.AF_PACKET, socket.AF_NETLINK)
_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, _UDPLITE)


def of_task(pid: int, who: str) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each kind of such sockets that the process with the
    host's pid ``pid`` has. Raises FileNotFoundError if the process has ended."""
    found: dict[tuple[str, str], None] = {}
    for family, kind, protocol in _kinds(pid):
        if family in _FAMILIES:
            continue
        if family in _INTERNET and (protocol in _PROTOCOLS or kind == socket.SOCK_RAW):
            continue
        if protocol == _MPTCP and family in _INTERNET:
            what = "an MPTCP socket"
            remedy = (
                "start a Go program with GODEBUG=multipathtcp=0, another one without mptcpize;"
                " with `sysctl net.mptcp.enabled=0` programs use TCP"
            )
        else:
            what = f"a socket of family {family}, type {kind}, protocol {protocol}"
            remedy = "close it, or use TCP"
        found[f"{who} has {what}, which CRIU cannot dump", remedy] = None
    return list(found)


def _kinds(pid: int) -> Iterator[tuple[int, int, int]]:
    for fd, target in descriptors(pid):
        if target.startswith("socket:"):
            with contextlib.suppress(OSError):  # it was closed, or the task has ended
                with socket.socket(fileno=lent(pid, fd)) as borrowed:
                    options = (_SO_DOMAIN, _SO_TYPE, _SO_PROTOCOL)
                    family, kind, protocol = (
                        borrowed.getsockopt(socket.SOL_SOCKET, each) for each in options
                    )
                yield family, kind, protocol
