# SPDX-License-Identifier: Apache-2.0
"""Is a network namespace locked (criu_glue/network.py)? Asked of nf_tables by netlink.

A question costs some ten microseconds; running nft(8) costs milliseconds, and the watcher asks a
hundred times a second.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from liveshift.criu_glue.network import LOCK_TABLE

_NETLINK_NETFILTER = 12
_GETTABLE = (10 << 8) | 1  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE
_TABLE_NAME = 1  # NFTA_TABLE_NAME
_INET = 1  # NFPROTO_INET
_REQUEST = 1  # NLM_F_REQUEST
_ERROR = 2  # NLMSG_ERROR
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def locked(pid: int) -> bool:
    """Whether the network namespace of ``pid`` has the lock.

    Enters it with the calling thread and comes back. Raises OSError (ProcessLookupError or
    FileNotFoundError when the process has ended).
    """
    with open("/proc/thread-self/ns/net") as home, open(f"/proc/{pid}/ns/net") as there:
        _enter(there.fileno())
        try:
            line = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        finally:
            _enter(home.fileno())
    with line:
        line.send(_question())
        reply = line.recv(65536)
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind != _ERROR:
        return True
    (code,) = struct.unpack_from("=i", reply, 16)
    if -code == errno.ENOENT:
        return False
    raise OSError(-code, os.strerror(-code))


def _question() -> bytes:
    name = LOCK_TABLE.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(name), _TABLE_NAME) + name
    attribute += bytes(-len(attribute) % 4)
    body = struct.pack("=BBH", _INET, 0, 0) + attribute
    return struct.pack("=IHHII", 16 + len(body), _GETTABLE, _REQUEST, 1, 0) + body


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
