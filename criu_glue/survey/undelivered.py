# SPDX-License-Identifier: Apache-2.0
"""Finds connections that a program has closed while the peer has not taken all of the data yet.

The kernel goes on sending the rest and the end of the connection by itself. No process has such a
socket open any more, so CRIU does not dump it (criu: sk-inet.c): after a move the peer would get no
more. The data come from /proc; nothing is stopped.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator

from .connections import decode_address, tcp_tables

REMEDY = "the capsule can move once the peer has taken what was sent"

LOOKS, LOOK_S = 5, 0.2
_SENDING = {4, 9, 11}
"""The states in which the peer has not confirmed the end: FIN_WAIT1, LAST_ACK, CLOSING
(include/net/tcp_states.h)."""
_JOB_BITS = 24
"""The capsules of a job share a subnet of this many bits. Other connections break anyway."""


def find(pid: int) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each such connection in the network namespace of
    ``pid``; [] if the process has ended."""
    text = "a closed connection to {} has data that the peer lacks"
    peers = (peer for table in tcp_tables(pid) for peer in parse(table))
    return [(text.format(peer), REMEDY) for peer in peers]


def stuck(pid: int) -> list[tuple[str, str]]:
    """Those of :func:`find` that remain for about a second."""
    found = find(pid)
    for _ in range(LOOKS):
        if not found:
            break
        time.sleep(LOOK_S)
        now = find(pid)
        found = [each for each in found if each in now]
    return found


def parse(table: str) -> Iterator[str]:
    """ADDRESS:PORT of the peers in the text of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        waits = int(fields[4].partition(":")[0], 16)
        if int(fields[3], 16) not in _SENDING or int(fields[9]) or not waits:
            continue
        (own, _, _), (peer, _, port) = fields[1].partition(":"), fields[2].partition(":")
        if _near(decode_address(own), decode_address(peer)):
            yield f"{decode_address(peer)}:{int(port, 16)}"


def _near(own: str, peer: str) -> bool:
    """Whether the peer is in the capsule itself or in its job."""
    here, there = ipaddress.ip_address(own), ipaddress.ip_address(peer)
    if here.is_loopback or here == there:
        return True
    return here.version == 4 and there in ipaddress.ip_network(f"{own}/{_JOB_BITS}", strict=False)
