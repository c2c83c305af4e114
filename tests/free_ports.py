# SPDX-License-Identifier: Apache-2.0
"""Ports for daemons of tests, several of which run at once."""

from __future__ import annotations

import contextlib
import secrets
import socket

FIRST, LAST = 10_000, 32_000
"""Below those that Linux gives to connections (ip_local_port_range): one that is free now may be
the near end of another test's connection a moment later, and then no daemon can listen there."""


def free_port() -> int:
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        with contextlib.suppress(OSError), socket.socket() as own:
            own.bind(("127.0.0.1", port))
            return port
