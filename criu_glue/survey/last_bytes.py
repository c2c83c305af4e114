# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel still delivers what the programs of a capsule had sent before they ended.

A program may close a connection, or end, before its peer has read all. The kernel goes on sending,
for as long as the network namespace is there.
"""

from __future__ import annotations

from pathlib import Path

from ..network.tcp_sockets import CLOSING, FIN_WAIT1, LAST_ACK, TcpSocket, tcp_sockets
from .unanswered import PROBE, waited_s

SILENT_S, SILENT_PROBES = 5.0, 5
"""A peer that acknowledges nothing for SILENT_S seconds, or does not answer SILENT_PROBES questions
for room (that takes 6 s, since the kernel doubles the wait from 0.2 s on), gets no more: it is
gone. Mostly it has ended, and its network too. One that a move pauses for longer loses the rest."""


def under_way(namespace: Path) -> bool:
    """Whether a closed connection in the network namespace still has bytes for a peer that is
    there. The end of a stream (FIN) does not count: who has ended has no use for it. Raises
    OSError; FileNotFoundError if the namespace is gone."""
    return any(map(_delivers, tcp_sockets(namespace, FIN_WAIT1, LAST_ACK, CLOSING)))


def _delivers(each: TcpSocket) -> bool:
    if each.unacknowledged <= 1:  # the FIN counts as one byte
        return False
    if each.timer == PROBE:
        return each.times < SILENT_PROBES
    return not each.times or waited_s(each) < SILENT_S
