# SPDX-License-Identifier: Apache-2.0
"""Asks peers of a capsule for echoes (RFC 792), from inside the capsule's network namespace.

The kernel of a peer answers without any process there. So an answer says that the way to the peer
and back is open, and programs notice nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable

from .sockets_inside import socket_inside

_ECHO, _REPLY = 8, 0
_HEAD = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence
_MOST = 2048
_SOL_RAW, _ICMP_FILTER = 255, 1  # linux/icmp.h; a bit for each type that is not to be received
_AT_ONCE = 4096
"""Number of messages that are read at one call."""


class Echoes:
    """``pid``: a process of the capsule. Raises OSError if it has ended."""

    def __init__(self, pid: int) -> None:
        self._socket = socket_inside(pid, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        self._socket.setblocking(False)
        # A locked network answers each frame with an ICMP error, which would fill the buffer.
        only_replies = struct.pack("=I", 0xFFFFFFFF & ~(1 << _REPLY))
        self._socket.setsockopt(_SOL_RAW, _ICMP_FILTER, only_replies)
        self._id = os.getpid() & 0xFFFF
        self._sent = 0

    def send(self, addresses: Iterable[str]) -> None:
        """Send one request to each address. One that cannot be sent gets no answer."""
        self._sent = self._sent + 1 & 0xFFFF
        head = _HEAD.pack(_ECHO, 0, 0, self._id, self._sent)
        message = _HEAD.pack(_ECHO, 0, checksum(head), self._id, self._sent)
        for address in addresses:
            try:
                self._socket.sendto(message, (address, 0))
            except OSError:  # no way there, or a full buffer
                continue

    def answered(self) -> set[str]:
        """The addresses from which answers have come since the last call. Raises OSError."""
        found = set[str]()
        for _ in range(_AT_ONCE):
            try:
                packet, (address, _) = self._socket.recvfrom(_MOST)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise
                continue  # an ICMP error about one of the requests
            body = packet[(packet[0] & 0xF) * 4 :]
            if len(body) >= _HEAD.size and self._answers(body):
                found.add(address)
        return found

    def close(self) -> None:
        self._socket.close()

    def _answers(self, body: bytes) -> bool:
        kind, _, _, identifier, number = _HEAD.unpack_from(body)
        late = self._sent - number & 0xFFFF > 1  # of an echo before the last two
        return (kind, identifier) == (_REPLY, self._id) and not late


def checksum(message: bytes) -> int:
    """The Internet checksum (RFC 1071) of a message of even length."""
    total: int = sum(struct.unpack(f"!{len(message) // 2}H", message))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
