# SPDX-License-Identifier: Apache-2.0
"""Finds TCP connections of a capsule that a move breaks: those to hosts outside the cluster.

Such a peer knows the capsule by the address of the host that masquerades it. That host's kernel
keeps the state of the connection, which does not move. A connection to the gateway of the job's
subnet breaks too, since the gateway is always the capsule's present host. The data come from /proc;
nothing is stopped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ... import proc_text
from ..capsule.sandboxes import Sandbox
from ..capsule.tree import descriptors, inner_pid, tasks

_OPEN = {1, 2, 4, 5, 8}
"""The states of an open connection: ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
(include/net/tcp_states.h)."""

LIBRARIES = {
    "cygrpc": "gRPC",
    "libgrpc": "gRPC",
    "libcurl": "libcurl",
    "libpq.": "libpq",
    "libmysqlclient": "libmysqlclient",
    "libmariadb": "libmariadb",
    "librdkafka": "librdkafka",
    "libhiredis": "hiredis",
    "libzmq": "ZeroMQ",
    "libmongoc": "libmongoc",
    "_ssl.": "Python's ssl",
}
"""Libraries that often hold such connections, by a part of their mapped file's name."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class OutsideConnection:
    """One connection; ``pid`` is the capsule's, 0 if no process has the socket open any more."""

    peer: str
    port: int
    pid: int = 0
    process: str = ""
    libraries: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"[{self.peer}]" if ":" in self.peer else self.peer
        words = f"{name}:{self.port}"
        with contextlib.suppress(OSError):
            words += f" ({socket.getservbyport(self.port, 'tcp')})"
        if self.pid:
            words += f", of process {self.pid} ({self.process})"
        if self.libraries:
            words += f", which has loaded {' and '.join(self.libraries)}"
        return words


def outside(sandbox: Sandbox, inside: Iterable[str], gateway: str) -> list[OutsideConnection]:
    """The connections to the ``gateway``, and those beyond loopback and the networks ``inside``.

    Returns [] for a capsule that has ended."""
    near = [ipaddress.ip_network(each) for each in (*inside, "127.0.0.0/8", "::1/128")]
    found = {
        inode: peer
        for table in tcp_tables(sandbox.init)
        for peer, inode in parse(table)
        if peer[0] == gateway or not _within(peer[0], near)
    }
    if not found:
        return []
    holders = _holders(sandbox, set(found))
    return sorted(
        {OutsideConnection(*peer, *holders.get(inode, ())) for inode, peer in found.items()},
        key=lambda each: (each.peer, each.port, each.pid),
    )


def parse(table: str) -> Iterator[tuple[tuple[str, int], int]]:
    """((peer, port), inode) of the open connections in the text of /proc/net/tcp or tcp6.

    An IPv4-mapped IPv6 address is returned as the IPv4 address."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) in _OPEN:
            raw, _, port = fields[2].partition(":")
            yield (decode_address(raw), int(port, 16)), int(fields[9])


def tcp_tables(pid: int) -> Iterator[str]:
    """The texts of /proc/net/tcp and tcp6 as ``pid`` sees them; none if the process has ended."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{pid}/net/{name}").read_text()


def decode_address(raw: str) -> str:
    """Decode an address; the kernel prints each four bytes as one number in host byte order."""
    words = [int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return str(address)


def _within(peer: str, networks: list[Network]) -> bool:
    address = ipaddress.ip_address(peer)
    return address.is_unspecified or any(address in network for network in networks)


def _holders(sandbox: Sandbox, inodes: set[int]) -> dict[int, tuple[int, str, tuple[str, ...]]]:
    """Inode of a socket → (capsule's pid, name, libraries) of the first process that has it."""
    targets = {f"socket:[{inode}]": inode for inode in inodes}
    held: dict[int, tuple[int, str, tuple[str, ...]]] = {}
    for task in tasks(sandbox):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            mine = {targets.get(target) for _, target in descriptors(task.pid)} - {None}
            if mine - held.keys():
                who = inner_pid(task.pid), task.name(), _libraries(task.pid)
                held = {inode: who for inode in mine if inode is not None} | held
    return held


def _libraries(pid: int) -> tuple[str, ...]:
    mapped = proc_text.lines(f"/proc/{pid}/maps")
    names = {line.rpartition("/")[2] for line in mapped if "/" in line}
    known = (what for part, what in LIBRARIES.items() if any(part in name for name in names))
    return tuple(dict.fromkeys(known))
