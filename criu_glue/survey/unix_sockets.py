# SPDX-License-Identifier: Apache-2.0
"""Finds connections of a capsule over UNIX sockets that cannot move: those to sockets outside it,
and those whose client closed before it was accepted.

A capsule reaches services of its host by the paths of their sockets. The kernel lists the sockets
of a network namespace with the inode of each socket's peer (sock_diag(7)). If no process of the
capsule has the peer open, a process outside has it, or it is in a message. A peer that was not
accepted yet has no inode; the listener's entry lists the sockets that wait for it, a closed one as
0. CRIU refuses such a closed one (criu: sk-unix.c, "Found a closed in-flight socket").
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from ... import proc_text
from ..capsule.sandboxes import Sandbox
from ..capsule.tree import descriptors
from ..network.socket_diag import attributes, sockets_of

_SHOWN = 0x04 | 0x08  # UDIAG_SHOW_PEER, UDIAG_SHOW_ICONS of linux/unix_diag.h
_PEER, _ICONS, _SHUTDOWN = 2, 3, 6
_BOTH_WAYS = 3  # shut down in both directions, also because the peer is gone
_ASKED = struct.Struct("=BBHIIIII")
_SOCKET = struct.Struct("=BBBBIII")


@dataclass
class _Seen:
    """The UNIX sockets of a network namespace, by inode.

    ``peers`` maps each connected socket to its peer, 0 while the peer is not accepted. ``ended``
    are sockets whose peer is gone. ``waiting`` are sockets that wait for a listener of this
    namespace, ``left`` the listeners for which a closed one waits."""

    every: set[int] = field(default_factory=set)
    peers: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)


def outside(sandbox: Sandbox, tree: Sequence[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """(what prevents a move, what to do) for each connection to a socket outside the capsule, and
    for each listener with a client that has closed already.

    ``tree``: the host's pid and the capsule's pid of each process. Raises OSError.
    """
    seen = _look(sandbox)
    held = {pid: _held(pid) for pid, _ in tree}
    own = set[int]().union(*held.values())
    for pid, inner in tree:
        if held[pid] & seen.left:
            yield (
                f"a client of process {inner} has closed its UNIX socket before it was accepted,"
                " which CRIU cannot dump",
                "once the process has accepted the connection, the capsule can move",
            )
            break
    away = {inode: seen.peers[inode] for inode in own & seen.peers.keys()}
    away = {inode: peer for inode, peer in away.items() if peer not in own}
    away = {i: p for i, p in away.items() if p or i not in seen.waiting | seen.ended}
    if not away:
        return
    others = _holders(set(away.values()), held.keys())
    for pid, inner in tree:
        for inode in held[pid] & away.keys():
            peer = away[inode]
            if peer in seen.every and peer not in others:
                continue  # the peer is in a message
            yield (
                f"process {inner} is connected to {others.get(peer, 'a UNIX socket')} outside its"
                " capsule, over a UNIX socket",
                "close the connection before the move, or end what needs it",
            )


def _held(pid: int) -> set[int]:
    """The sockets that a process has open."""
    with contextlib.suppress(OSError):
        targets = [target for _, target in descriptors(pid)]
        return {int(target[8:-1]) for target in targets if target.startswith("socket:[")}
    return set()


def _holders(wanted: set[int], own: Container[int]) -> dict[int, str]:
    """Inode → the process outside the capsule that has it open, in words."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) not in own:
            for inode in _held(int(name)) & wanted:
                with contextlib.suppress(OSError):
                    comm = proc_text.read(f"/proc/{name}/comm").strip()
                    found[inode] = f"process {name} ({comm}) of its host"
    return found


def _look(sandbox: Sandbox) -> _Seen:
    found = _Seen()
    asked = _ASKED.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOWN, 0, 0)
    for entry in sockets_of(sandbox.init, asked):
        _read(entry, found)
    return found


def _read(entry: bytes, found: _Seen) -> None:
    inode = _SOCKET.unpack_from(entry)[4]
    found.every.add(inode)
    for kind, value in attributes(entry, _SOCKET.size):
        if kind == _PEER:
            (found.peers[inode],) = struct.unpack("=I", value)
        elif kind == _ICONS:
            waiting = struct.unpack(f"={len(value) // 4}I", value)
            found.waiting.update(waiting)
            if 0 in waiting:
                found.left.add(inode)
        elif kind == _SHUTDOWN and value[0] == _BOTH_WAYS:
            found.ended.add(inode)
