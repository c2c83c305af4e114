# SPDX-License-Identifier: Apache-2.0
"""Finds the peers of a capsule whose kernels do not acknowledge what it has sent.

A kernel acknowledges also while its process is stopped or busy, and its window is full then. So
such a peer is dead or cut off, or its network is locked. The data come from /proc; nothing is
stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from .connections import decode_address, tcp_tables

_OPEN = {1, 8}
"""ESTABLISHED and CLOSE_WAIT (include/net/tcp_states.h): states in which a program sends."""
_RETRANSMITS = 1
"""What the kernel waits for: to send again what was not acknowledged (get_tcp4_sock in
net/ipv4/tcp_ipv4.c). It is another number if a full window stops it."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def timeouts(pid: int) -> int:
    """How often a connection in the network namespace of ``pid`` was not answered in time, ever; 0
    if the process has ended. This takes 0.2 ms, and :func:`unanswered` 40: the kernel looks at the
    connections of all namespaces for it."""
    with contextlib.suppress(OSError, ValueError):
        names, values, *_ = Path(f"/proc/{pid}/net/netstat").read_text().splitlines()
        return int(values.split()[names.split().index("TCPTimeouts")])
    return 0


def unanswered(pid: int, subnet: str) -> dict[str, float]:
    """By address of a peer in ``subnet``: seconds for which it has not answered, as the network
    namespace of ``pid`` shows it. Peers that answer are not in it; {} if the process has ended."""
    near, found = ipaddress.ip_network(subnet), dict[str, float]()
    for table in tcp_tables(pid):
        for peer, seconds in parse(table):
            if ipaddress.ip_address(peer) in near:
                found[peer] = max(seconds, found.get(peer, 0.0))
    return found


def parse(table: str) -> Iterator[tuple[str, float]]:
    """(peer, seconds) of each connection in the text of /proc/net/tcp or tcp6 that waits for an
    acknowledgement after it has sent again.

    The kernel waits for the timeout, sends again and doubles the timeout, until an acknowledgement
    puts it back. So the timeout, the number of times and what is left of the present wait say when
    it all began. With ICMP errors the kernel doubles less (RFC 6069), and above two minutes it
    doubles no more. Then this is less than the truth.
    """
    for line in table.splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) not in _OPEN:
            continue  # others have fewer fields
        timer, left = fields[5].split(":")
        times, timeout = int(fields[6], 16), int(fields[12])
        if int(timer, 16) == _RETRANSMITS and times:
            waited = 2 * timeout - timeout / 2**times - int(left, 16)
            yield decode_address(fields[2].partition(":")[0]), max(0.0, waited * _TICK_S)
