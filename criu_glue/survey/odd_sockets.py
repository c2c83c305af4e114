# SPDX-License-Identifier: Apache-2.0
"""Finds sockets of kinds that CRIU cannot dump.

CRIU knows UNIX, packet and netlink sockets, and of the Internet's TCP, UDP, UDP-Lite and raw ones
(criu: sockets.c, sk-inet.c). Programs in Go listen by Multipath TCP since Go 1.24, without having
asked for it.
"""

from __future__ import annotations

import socket

from .borrowed_sockets import kind, sockets

_MPTCP, _UDPLITE = 262, 136  # linux/in.h
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_FAMILIES = (socket.AF_UNIX, socket.AF_PACKET, socket.AF_NETLINK)
_PROTOCOLS = (socket.IPPROTO_TCP, socket.IPPROTO_UDP, _UDPLITE)


def of_task(pid: int, who: str) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each kind of such sockets that the process with the
    host's pid ``pid`` has. Raises FileNotFoundError if the process has ended."""
    found: dict[tuple[str, str], None] = {}
    for family, type_, protocol in map(kind, sockets(pid)):
        if family in _FAMILIES:
            continue
        if family in _INTERNET and (protocol in _PROTOCOLS or type_ == socket.SOCK_RAW):
            continue
        if protocol == _MPTCP and family in _INTERNET:
            what = "an MPTCP socket"
            remedy = (
                "start a Go program with GODEBUG=multipathtcp=0, another one without mptcpize;"
                " with `sysctl net.mptcp.enabled=0` programs use TCP"
            )
        else:
            what = f"a socket of family {family}, type {type_}, protocol {protocol}"
            remedy = "close it, or use TCP"
        found[f"{who} has {what}, which CRIU cannot dump", remedy] = None
    return list(found)
