# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how a daemon is doing, over the socket named in NOTIFY_SOCKET.

The protocol is sd_notify(3)'s: one datagram of ``KEY=value`` lines. Outside systemd the variable
is not set and nothing is sent.
"""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> bool:
    """Send the lines; False when nobody asked to be told. Raises OSError if sending fails."""
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


def ready(status: str = "") -> bool:
    """The daemon serves from now on (a Type=notify unit waits for this); ``status`` is shown by
    ``systemctl status``."""
    return notify("READY=1", *([f"STATUS={status}"] if status else []))


def stopping() -> bool:
    """The daemon is on its way out."""
    return notify("STOPPING=1")
