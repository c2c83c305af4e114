# SPDX-License-Identifier: Apache-2.0
"""Finds the peers of a capsule whose kernels do not acknowledge what it has sent.

A kernel acknowledges also while its process is stopped or busy. So such a peer is dead or cut off,
its network is locked, or its command has ended and its network is gone. Nothing is stopped for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator

from ... import proc_text
from .socket_diag import attributes, sockets_of

_ESTABLISHED, _CLOSE_WAIT = 1, 8
"""The states in which a program sends (include/net/tcp_states.h)."""
_RETRANSMIT, _PROBE = 1, 4
"""What a connection's timer is for: to send again what was not acknowledged, or to ask whether the
peer's full window has become free (inet_sk_diag_fill in net/ipv4/inet_diag.c)."""
_INFO = 2  # INET_DIAG_INFO, linux/inet_diag.h
_ASKED = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
_ENTRY = struct.Struct("=BBBBHH16s16sIIIIIIII")  # struct inet_diag_msg
_TIMEOUT = struct.Struct("=8xI")  # tcpi_rto of struct tcp_info, in microseconds


def missed_answers(pid: int) -> int:
    """How often a connection in the network namespace of ``pid`` was not answered in time, or had
    to ask for room at the peer; 0 if the process has ended. It only grows, and reading it takes
    0.2 ms."""
    with contextlib.suppress(OSError, ValueError):
        names, values, *_ = proc_text.lines(f"/proc/{pid}/net/netstat")
        counters = dict(zip(names.split(), values.split(), strict=True))
        return int(counters["TCPTimeouts"]) + int(counters.get("TCPWinProbe", 0))
    return 0


def unanswered(pid: int, subnet: str) -> dict[str, float]:
    """By address of a peer in ``subnet``: seconds for which it has not acknowledged what was sent,
    as the network namespace of ``pid`` shows it; 0 if the kernel does not say how long. Peers that
    acknowledge are not in it. Raises OSError."""
    own, found = ipaddress.ip_network(subnet), dict[str, float]()
    for family in (socket.AF_INET, socket.AF_INET6):
        states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, states)
        for entry in sockets_of(pid, asked):
            for peer, seconds in _silent(entry):
                if ipaddress.ip_address(peer) in own:
                    found[peer] = max(seconds, found.get(peer, 0.0))
    return found


def _silent(entry: bytes) -> Iterator[tuple[str, float]]:
    """(peer, seconds) if this connection waits for an answer in vain.

    The kernel waits for the timeout, sends again and doubles the timeout, until an acknowledgement
    puts it back. So the timeout, the number of times and what is left of the present wait say when
    it all began. With ICMP errors the kernel doubles less (RFC 6069), and above two minutes it
    doubles no more. Then this is less than the truth. Probes of a full window do not begin anew
    with an answer, so their number alone says that the last ones had none.
    """
    family, _, timer, times, _, _, _, peer, _, _, _, left_ms, *_ = _ENTRY.unpack_from(entry)
    if timer not in (_RETRANSMIT, _PROBE) or not times:
        return
    info = next((value for kind, value in attributes(entry, _ENTRY.size) if kind == _INFO), b"")
    if timer == _PROBE or len(info) < _TIMEOUT.size:
        yield _address(family, peer), 0.0
        return
    (timeout_us,) = _TIMEOUT.unpack_from(info)
    waited = (2 * timeout_us - timeout_us / 2**times) * 1e-6 - left_ms * 1e-3
    yield _address(family, peer), max(0.0, waited)


def _address(family: int, raw: bytes) -> str:
    """As text; an IPv4-mapped IPv6 address is returned as the IPv4 address."""
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)
