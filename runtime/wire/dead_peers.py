# SPDX-License-Identifier: Apache-2.0
"""Lets the kernel end a connection whose other host is gone.

A host that loses its power in the middle of an image says nothing more, and a socket that only
receives never notices. Each such host would leave its connections to an agent that runs for months.
An image is given up much sooner (silence.py). This module only closes the connections that remain.
"""

from __future__ import annotations

import zmq

IDLE_S = 60
"""Seconds of silence after which the kernel asks the other host to acknowledge a probe."""

PROBES, PROBE_S = 3, 20
"""Number of unanswered probes after which the connection ends, and seconds between two."""


def end_dead_peers(socket: zmq.Socket[bytes]) -> None:
    """Set this for all connections of a socket, before it is bound or connected (tcp(7))."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
    # The kernel probes nothing while it still repeats what it has sent. This limits that time, and
    # that of the probes as well (TCP_USER_TIMEOUT).
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * (IDLE_S + PROBES * PROBE_S))
