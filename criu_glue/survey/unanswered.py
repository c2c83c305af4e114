# SPDX-License-Identifier: Apache-2.0
"""Finds the peers of a capsule whose kernels do not acknowledge what it has sent.

A kernel acknowledges also while its process is stopped or busy. So such a peer is dead or cut off,
its network is locked, or its command has ended and its network is gone. Nothing is stopped for it.
"""

from __future__ import annotations

import contextlib
import ipaddress

from ... import proc_text
from ..network.tcp_sockets import CLOSE_WAIT, ESTABLISHED, TcpSocket, tcp_sockets

_RETRANSMIT, PROBE = 1, 4
"""What a connection's timer is for: to send again what was not acknowledged, or to ask whether the
peer's full window has become free."""


def missed_answers(pid: int) -> int:
    """How often a connection in the network namespace of ``pid`` was not answered in time, or had
    to ask for room at the peer; 0 if the process has ended. It only grows, and reading it takes
    0.2 ms."""
    with contextlib.suppress(OSError, ValueError):
        names, values, *_ = proc_text.lines(f"/proc/{pid}/net/netstat")
        counters = dict(zip(names.split(), values.split(), strict=True))
        return sum(int(counters.get(name, 0)) for name in ("TCPTimeouts", "TCPWinProbe"))
    return 0


def unanswered(pid: int, subnet: str) -> dict[str, float]:
    """By address of a peer in ``subnet``: seconds for which it has not acknowledged what was sent,
    as the network namespace of ``pid`` shows it; 0 if the kernel does not say how long. Peers that
    acknowledge are not in it. Raises OSError."""
    own, found = ipaddress.ip_network(subnet), dict[str, float]()
    for each in tcp_sockets(pid, ESTABLISHED, CLOSE_WAIT):  # in these a program sends
        silent = each.times and each.timer in (_RETRANSMIT, PROBE)
        if silent and ipaddress.ip_address(each.peer) in own:
            found[each.peer] = max(waited_s(each), found.get(each.peer, 0.0))
    return found


def waited_s(each: TcpSocket) -> float:
    """Seconds for which a connection has waited for an answer; 0 if that is not known.

    The kernel waits for the timeout, sends again and doubles the timeout, until an acknowledgement
    puts it back. So the timeout, the number of times and what is left of the present wait say when
    it all began. With ICMP errors the kernel doubles less (RFC 6069), and above two minutes it
    doubles no more. Then this is less than the truth. Probes of a full window do not begin anew
    with an answer, so their number alone says that the last ones had none.
    """
    if each.timer == PROBE:
        return 0.0
    return max(0.0, 2 * each.timeout_s - each.timeout_s / 2.0**each.times - each.left_s)
