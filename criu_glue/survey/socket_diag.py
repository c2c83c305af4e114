# SPDX-License-Identifier: Apache-2.0
"""Asks the kernel for the sockets of a network namespace (sock_diag(7)).

That is far quicker than /proc/net: with few sockets and a large table of connections /proc/net/tcp
takes 20 ms, and this less than one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from ..network.sockets_inside import netlink

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG, linux/netlink.h
_BY_FAMILY, _REQUEST, _DUMP = 20, 0x01, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")


def sockets_of(pid: int, asked: bytes) -> Iterator[bytes]:
    """Yield the kernel's entry for each socket that the request ``asked`` selects in the network
    namespace of ``pid``. Raises OSError."""
    with netlink(pid, _SOCK_DIAG) as line:
        size = _HEAD.size + len(asked)
        line.send(_HEAD.pack(size, _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + asked)
        while True:
            raw, at = line.recv(1 << 16), 0
            while at + _HEAD.size <= len(raw):
                size, kind, *_ = _HEAD.unpack_from(raw, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", raw, at + _HEAD.size)
                    raise OSError(-code, os.strerror(-code))
                if kind == _BY_FAMILY:
                    yield raw[at + _HEAD.size : at + size]
                at += max(_HEAD.size, size + 3 & ~3)


def attributes(entry: bytes, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, value) of each attribute of an entry, whose fixed part ends at ``begin``."""
    at = begin
    while at + _ATTRIBUTE.size <= len(entry):
        length, kind = _ATTRIBUTE.unpack_from(entry, at)
        yield kind, entry[at + _ATTRIBUTE.size : at + length]
        at += max(_ATTRIBUTE.size, length + 3 & ~3)
