# SPDX-License-Identifier: Apache-2.0
"""The lock on a capsule's network: one nftables table that is active or dormant.

While the table is active, nothing passes a frozen capsule's eth0. Loopback stays open, else CRIU's
probe of 127.0.0.1 takes 133 s. The kernel answers TCP from peers with ICMP host unreachable instead
of dropping it, unless it is to make a connection. An established connection treats that as a soft
error and does not back off its retransmissions (RFC 6069; tcp_ld_RTO_revert). So data in flight
arrives milliseconds after the unlock; with drops it could take up to twice the freeze.

At a destination the lock also drops what resets connections over loopback (RESTORE_RULES). CRIU
makes the kernel probe the peer of each connection that it restores. If the peer was closed before
the dump, no process had it open, and the image does not have it: the kernel would answer the probe
with a reset, and the program would see an error where it should read what came and then the end.

A snapshot closes the locks of all capsules of a job at once. A capsule's own retransmissions then
die at its own lock, without an answer, so the kernel doubles their interval each time
(net/ipv4/tcp_timer.c, tcp_retransmit_timer). With ``ingress_only`` a lock stops only what comes in.
The retransmissions get to the peer, the peer's lock answers them, and the answer passes. Programs
receive nothing else, so no image has an effect of what a peer did after the lock.

The job is paused while the lock changes, so it must be fast. The table therefore stays when the
lock is opened: removing rules costs a grace period of the kernel (13 ms on two cores), but one
message of 0.1 ms makes the table dormant or active. nft(8), which takes 3 ms to start, only makes
the table.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from ...errors import LiveshiftError
from .iproute import run
from .sockets_inside import netlink

LOCK_TABLE = "liveshift_lock"

# What the kernel does with a host-unreachable (net/ipv4/tcp_ipv4.c, tcp_v4_err): in an established
# connection it takes back the doubled interval (tcp_ld_RTO_revert), and programs see no error. But
# a connect() ends with EHOSTUNREACH, and a listener forgets a connection that is half made
# (tcp_req_err). So the lock does not answer a SYN, which is sent again after a second.
_RULES = """table inet {table} {{
  {flags}
  chain in {{ type filter hook input priority -300;
    iifname "eth0" tcp flags & syn == syn drop
    iifname "eth0" meta l4proto tcp reject with icmp type host-unreachable
    iifname "eth0" drop
  }}
  chain out {{ type filter hook output priority -300;
    oifname "eth0" icmp type destination-unreachable accept
    oifname "eth0" drop
  }}
}}
"""
# Host-unreachable comes from the locks of peers. Other ICMP errors stay out: a peer that was
# unlocked earlier may have sent them.
_INGRESS_RULES = """table inet {table} {{
  {flags}
  chain in {{ type filter hook input priority -300;
    iifname "eth0" icmp type destination-unreachable icmp code host-unreachable accept
    iifname "eth0" tcp flags & syn == syn drop
    iifname "eth0" meta l4proto tcp reject with icmp type host-unreachable
    iifname "eth0" drop
  }}
}}
"""
LOCK_RULES = _RULES.format(table=LOCK_TABLE, flags="")
"""The nft rules of the closed lock."""
RESTORE_RULES = f"""{LOCK_RULES}table inet {LOCK_TABLE} {{
  chain resets {{ type filter hook output priority -300;
    oifname "lo" tcp flags & rst == rst drop
  }}
}}
"""
"""The nft rules of the lock of a namespace in which nothing runs yet."""
_WITHOUT_RESETS = f"delete chain inet {LOCK_TABLE} resets\n"
_OPEN = _RULES.format(table=LOCK_TABLE, flags="flags dormant;")
_INGRESS_OPEN = _INGRESS_RULES.format(table=LOCK_TABLE, flags="flags dormant;")
_DELETE = f"delete table inet {LOCK_TABLE}\n"
"""Followed by the rules of a new table: nft(8) replaces the table in one transaction."""

_DORMANT = 1  # linux/netfilter/nf_tables.h: NFT_TABLE_F_DORMANT
_NEWTABLE, _GETTABLE = 10 << 8, 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES
_NAME, _FLAGS = 1, 2  # NFTA_TABLE_NAME, NFTA_TABLE_FLAGS
_BATCH_BEGIN, _BATCH_END, _OF_NFTABLES = 16, 17, 10  # linux/netfilter/nfnetlink.h
_NETLINK_NETFILTER = 12
_REQUEST, _ACK = 1, 4  # NLM_F_REQUEST, NLM_F_ACK
_ERROR = 2  # NLMSG_ERROR
_INET = 1  # NFPROTO_INET
_ANSWER_S = 10.0


def prepare_lock(pid: int, *, ingress_only: bool = False) -> None:
    """Make an open lock in the network namespace of ``pid``, so that :func:`lock` is fast.

    ``ingress_only``: until it is prepared again, the lock stops only what comes in. That is for a
    capsule that goes on here after the freeze. A lock for a capsule that leaves also stops what
    goes out.

    A closed lock stays as it is. If it came with the capsule's restore, it drops no resets any
    more: programs run until the freeze. Raises LiveshiftError, as lock and unlock do.
    """
    rules = _INGRESS_OPEN if ingress_only else _OPEN
    with _table(pid) as table:
        if table.flags is None:
            _load(pid, rules)
            return
        if table.flags & _DORMANT:
            _load(pid, _DELETE + rules)
            return
    with contextlib.suppress(LiveshiftError):  # it has no such chain
        _load(pid, _WITHOUT_RESETS)


def lock(pid: int) -> None:
    """Close the lock: nothing passes eth0 of the network namespace of ``pid``, or nothing comes in
    (see :func:`prepare_lock`). A lock that was not prepared stops both ways. May be repeated."""
    with _table(pid) as table:
        if table.flags is None:
            _load(pid, LOCK_RULES)
        elif table.flags & _DORMANT:
            table.set(table.flags & ~_DORMANT)


def unlock(pid: int) -> None:
    """Open the lock of the network namespace of ``pid``: all traffic passes. May be repeated."""
    with _table(pid) as table:
        if table.flags is not None and not table.flags & _DORMANT:
            table.set(table.flags | _DORMANT)


def locked(pid: int) -> bool:
    """True if the lock is closed; raises OSError, FileNotFoundError if the process has ended."""
    with _Table(pid) as table:
        return table.flags is not None and not table.flags & _DORMANT


@contextmanager
def _table(pid: int) -> Iterator[_Table]:
    try:
        with _Table(pid) as table:
            yield table
    except OSError as error:
        raise LiveshiftError(
            f"network: the lock of the namespace of process {pid} cannot be changed: {error}",
            hint="`liveshift doctor` checks nftables on this host",
        ) from error


def _load(pid: int, rules: str) -> None:
    run(["nsenter", "--target", str(pid), "--net", "--", "nft", "-f", "-"], rules)


class _Table:
    """The lock's table in another network namespace."""

    def __init__(self, pid: int) -> None:
        self._line = netlink(pid, _NETLINK_NETFILTER)
        self._line.settimeout(_ANSWER_S)

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    @cached_property
    def flags(self) -> int | None:
        """The table's flags; None if there is no such table."""
        self._line.send(_message(_GETTABLE, _REQUEST, _NAME_OF_LOCK))
        reply = self._line.recv(65536)
        (kind,) = struct.unpack_from("=H", reply, 4)
        if kind != _ERROR:
            return _number(reply, _FLAGS)
        code = _error(reply)
        if code == errno.ENOENT:
            return None
        raise OSError(code, f"nf_tables: {os.strerror(code)}")

    def set(self, flags: int) -> None:
        """Set the table's flags, in a batch, since nf_tables takes every change as a batch."""
        wanted = _NAME_OF_LOCK + _attribute(_FLAGS, struct.pack(">I", flags))
        self._line.send(
            _message(_BATCH_BEGIN, _REQUEST, b"", _OF_NFTABLES)
            + _message(_NEWTABLE, _REQUEST | _ACK, wanted)
            + _message(_BATCH_END, _REQUEST, b"", _OF_NFTABLES)
        )
        if code := _error(self._line.recv(65536)):
            raise OSError(code, f"nf_tables: {os.strerror(code)}")


def _error(reply: bytes) -> int:
    return -int(struct.unpack_from("=i", reply, 16)[0])


def _message(kind: int, flags: int, attributes: bytes, resource: int = 0) -> bytes:
    family = 0 if resource else _INET
    body = struct.pack("=BB", family, 0) + struct.pack(">H", resource) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    raw = struct.pack("=HH", 4 + len(value), kind) + value
    return raw + bytes(-len(raw) % 4)


def _number(message: bytes, wanted: int) -> int:
    """The 32-bit attribute ``wanted`` of a message of nf_tables; 0 if the message lacks it."""
    at, end = 20, struct.unpack_from("=I", message)[0]
    while at + 4 <= end:
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == wanted:
            return int(struct.unpack_from(">I", message, at + 4)[0])
        at += max(4, size + 3 & ~3)
    return 0


_NAME_OF_LOCK = _attribute(_NAME, LOCK_TABLE.encode() + b"\0")
