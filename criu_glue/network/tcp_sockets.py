# SPDX-License-Identifier: Apache-2.0
"""The TCP sockets of a network namespace, as the kernel describes them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .socket_diag import attributes, destroy, sockets_of

ESTABLISHED, FIN_WAIT1, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 1, 4, 8, 9, 10, 11
_OPEN = (ESTABLISHED, 2, FIN_WAIT1, 5, CLOSE_WAIT)
"""The states of an open connection: these three, and SYN_SENT, FIN_WAIT2
(include/net/tcp_states.h)."""
_INFO = 2  # INET_DIAG_INFO, linux/inet_diag.h
_ASKED = struct.Struct("=BBBxI48s")  # struct inet_diag_req_v2
_ENTRY = struct.Struct("=BBBB48sIII4xI")  # struct inet_diag_msg
_PORTS = struct.Struct("!HH16x16s12x")  # of struct inet_diag_sockid
_TIMEOUT = struct.Struct("=8xI")  # tcpi_rto of struct tcp_info, in microseconds


@dataclass(frozen=True)
class TcpSocket:
    """One socket. ``timer``: what it is for (inet_sk_diag_fill in net/ipv4/inet_diag.c). ``times``:
    how often it has run out without an answer. ``left_s``: seconds until it runs out again.
    ``timeout_s``: seconds for which the kernel waits now before it sends again.
    ``unacknowledged``: bytes that the peer has yet to acknowledge. ``received``: bytes that the
    program has not read; for a socket that listens, connections that it has not accepted.
    ``own_port``: the socket's own one, while ``port`` is the peer's. ``inode``: 0 if no process has
    the socket open."""

    family: int
    identity: bytes
    peer: str
    port: int
    timer: int
    times: int
    left_s: float
    timeout_s: float
    unacknowledged: int
    received: int = 0
    own_port: int = 0
    inode: int = 0


def tcp_sockets(where: int | Path, *states: int) -> Iterator[TcpSocket]:
    """Yield the sockets in these states in a network namespace; ``where``: as in
    sockets_inside.socket_inside. An IPv4-mapped IPv6 address is given as the IPv4 address. Raises
    OSError."""
    mask = sum(1 << state for state in states)
    for family in (socket.AF_INET, socket.AF_INET6):
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, mask, bytes(48))
        for entry in sockets_of(where, asked):
            yield _read(entry)


def abort_all_but(pid: int, inside: str, gateway: str) -> list[str]:
    """Close each open connection in the network namespace of ``pid`` that leads out of the subnet
    ``inside``, loopback excepted, or to the ``gateway``. Returns ADDRESS:PORT of their peers.
    Raises OSError."""
    own = ipaddress.ip_network(inside)
    found = []
    for each in list(tcp_sockets(pid, *_OPEN)):
        address = ipaddress.ip_address(each.peer)
        if each.peer != gateway and (address in own or address.is_loopback):
            continue
        try:
            asked = _ASKED.pack(each.family, socket.IPPROTO_TCP, 0, 0, each.identity)
            destroy(pid, asked)
        except FileNotFoundError:  # it is closed already
            continue
        name = f"[{each.peer}]" if address.version == 6 else each.peer
        found.append(f"{name}:{each.port}")
    return found


def _read(entry: bytes) -> TcpSocket:
    family, _, timer, times, identity, left_ms, received, queued, inode = _ENTRY.unpack_from(entry)
    own_port, port, raw = _PORTS.unpack(identity)
    info = next((value for kind, value in attributes(entry, _ENTRY.size) if kind == _INFO), b"")
    (timeout_us,) = _TIMEOUT.unpack_from(info) if len(info) >= _TIMEOUT.size else (0,)
    peer = _address(family, raw)
    return TcpSocket(
        family,
        identity,
        peer,
        port,
        timer,
        times,
        left_ms * 1e-3,
        timeout_us * 1e-6,
        queued,
        received,
        own_port,
        inode,
    )


def _address(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)
