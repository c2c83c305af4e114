# SPDX-License-Identifier: Apache-2.0
"""Ports for daemons of tests, several of which run at once."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import deque

FIRST, LAST = 10_000, 32_000
"""Below those that Linux gives to connections (ip_local_port_range): one that is free now may be
the near end of another test's connection a moment later, and then no daemon can listen there."""

HELD = 64
"""So many of the ports given last are held for the daemons that will listen there."""

_held: deque[socket.socket] = deque()


def free_port() -> int:
    """A TCP port of 127.0.0.1 at which nobody listens, and which no test has been given of late: a
    UDP socket of the same number says so to this process and to others."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with contextlib.closing(socket.socket()) as own:
                own.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _held.append(claim)
        while len(_held) > HELD:
            _held.popleft().close()
        return port
