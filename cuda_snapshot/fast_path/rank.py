# SPDX-License-Identifier: Apache-2.0
"""The expendable process of the trial: it gives its physical memory away, is checkpointed and
restored, and maps it back. ``python -m … UUID FD``, with a socket to trial.py as FD.

As in a rank, one thread calls CUDA all the time, and another one hands memory over, which is spared
when threads are held. The first one is in no code of Python's when it is held: it waits in a call.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import traceback
from typing import NoReturn

from ..hold import SERVICE
from .memory import Memory

GIVEN, KEPT = 0x5EED1E55, 0x0DDBA11
"""What the handed over memory and the rest hold."""

_PR_SET_NAME = 15


class Rank:
    """Its memory: some that stays with the driver, and some that is given away."""

    def __init__(self, uuid: str) -> None:
        self.memory = Memory(uuid)
        self.kept, self.given = self.memory.allocate(), self.memory.reserve()
        handle = self.memory.create()
        self.memory.map(self.given, handle)
        self.memory.fill(self.given, GIVEN)
        self.memory.release(handle)
        self.rounds = 0
        """Of the thread that calls CUDA."""

    def call(self) -> NoReturn:
        """Without end: work for the GPU, and calls that wait for it."""
        while True:
            self.memory.fill(self.kept, KEPT)
            self.rounds += 1

    def serve(self, peer: socket.socket) -> None:
        """What the trial asks for, a word each, until it closes the socket."""
        self.memory.enter()
        peer.sendall(b"made")
        while word := peer.recv(16):
            if word == b"give":
                handle = self.memory.retained(self.given)
                descriptor = self.memory.exported(handle)
                self.memory.unmap(self.given, handle)
                socket.send_fds(peer, [b"given"], [descriptor])
                os.close(descriptor)
            elif word == b"take":
                peer.sendall(b"ready")
                _, (descriptor,), _, _ = socket.recv_fds(peer, 16, 1)
                handle = self.memory.imported(descriptor)
                self.memory.map(self.given, handle)
                self.memory.release(handle)
                os.close(descriptor)
                right = self.memory.holds(self.given, GIVEN)
                peer.sendall(b"right" if right else b"wrong")
            else:
                before = self.rounds
                while self.rounds < before + 2:
                    os.sched_yield()
                peer.sendall(b"right" if self.memory.holds(self.kept, KEPT) else b"wrong")


def main(uuid: str, peer: socket.socket) -> None:
    """Ends without a word where a call fails: what it raises is on standard error."""
    rank = Rank(uuid)

    def serve() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, SERVICE.encode(), 0, 0, 0)
        try:
            rank.serve(peer)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    threading.Thread(target=serve, daemon=True).start()
    rank.call()


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
