# SPDX-License-Identifier: Apache-2.0
"""The expendable process of the trial: it gives its physical memory away, is checkpointed and
restored, and maps it back. ``python -m … UUID FD``, with a socket to trial.py as FD."""

from __future__ import annotations

import os
import socket
import sys

from .memory import Memory

GIVEN, KEPT = 0x5EED1E55, 0x0DDBA11
"""What the handed over memory and the rest hold."""


def main(uuid: str, peer: socket.socket) -> None:
    """Ends without a word where a call fails: what it raises is on standard error."""
    memory = Memory(uuid)
    kept, given, handle = memory.allocate(), memory.reserve(), memory.create()
    memory.map(given, handle)
    memory.fill(kept, KEPT)
    memory.fill(given, GIVEN)
    descriptor = memory.exported(handle)
    memory.unmap(given, handle)
    socket.send_fds(peer, [b"given"], [descriptor])
    os.close(descriptor)
    # The trial takes this process through its checkpoint while it waits here.
    _, (descriptor,), _, _ = socket.recv_fds(peer, 16, 1)
    memory.map(given, memory.imported(descriptor))
    os.close(descriptor)
    right = memory.holds(given, GIVEN) and memory.holds(kept, KEPT)
    peer.sendall(b"right" if right else b"wrong")


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
