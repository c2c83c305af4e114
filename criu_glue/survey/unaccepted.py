# SPDX-License-Identifier: Apache-2.0
"""Finds TCP connections that a program of the capsule has not accepted yet, which CRIU cannot dump.

For a socket that listens, the kernel gives the number of them as its receive queue (sock_diag(7)).
CRIU refuses a listener whose number is not zero (criu: sk-inet.c, can_dump_ipv4_sk).
"""

from __future__ import annotations

import contextlib
from collections.abc import Container

import psutil

from ..capsule.sandboxes import Sandbox
from ..capsule.tree import descriptors, inner_pid, tasks
from ..network.tcp_sockets import LISTEN, tcp_sockets

REMEDY = "the capsule can move once the program has accepted it"


def find(sandbox: Sandbox) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each listener with such connections; [] if the capsule
    has ended. Raises OSError if the kernel does not answer."""
    try:
        listening = [*tcp_sockets(sandbox.init, LISTEN)]
    except (FileNotFoundError, ProcessLookupError):
        return []
    waits = {f"socket:[{each.inode}]": each.own_port for each in listening if each.received}
    if not waits:
        return []
    holders = _holders(sandbox, waits.keys())
    return [
        (
            f"{holders.get(target, 'a process')} has not accepted a TCP connection to its port"
            f" {port} yet, which CRIU cannot dump",
            REMEDY,
        )
        for target, port in waits.items()
    ]


def _holders(sandbox: Sandbox, wanted: Container[str]) -> dict[str, str]:
    """Return for each socket in ``wanted`` the first process of the capsule that has it open, in
    words. Sockets are named as the links below /proc/PID/fd name them."""
    found: dict[str, str] = {}
    for task in tasks(sandbox):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            who = f"process {inner_pid(task.pid)} ({task.name()})"
            for _, target in descriptors(task.pid):
                if target in wanted:
                    found.setdefault(target, who)
    return found
