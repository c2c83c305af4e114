# SPDX-License-Identifier: Apache-2.0
"""Reports a daemon's state to systemd, over the socket named in NOTIFY_SOCKET.

The protocol is that of sd_notify(3): one datagram of ``KEY=value`` lines. Outside systemd the
variable is not set, and nothing is sent.
"""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Send the lines; return False without NOTIFY_SOCKET. Raises OSError if sending fails."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return False
    if where[0] not in "/@":
        raise OSError(f'NOTIFY_SOCKET is "{where}", expected a path or an abstract name (@…)')
    address = "\0" + where[1:] if where[0] == "@" else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect(address)
        sender.sendall("\n".join(lines).encode())
    return True


def ready() -> bool:
    """Report that the daemon serves from now on. A unit with Type=notify waits for this."""
    return notify("READY=1")


def stopping() -> bool:
    """Report that the daemon is about to end."""
    return notify("STOPPING=1")
