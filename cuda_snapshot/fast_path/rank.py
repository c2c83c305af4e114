# SPDX-License-Identifier: Apache-2.0
"""The trial's own process in place of a rank: it gives its physical memory away, is checkpointed
and restored, and maps the memory back. ``python -m … UUID FD``, with a socket to trial.py as FD.

As in a rank, one thread calls CUDA again and again, and uses the memory that is given away. Another
thread hands memory over; it is spared when threads are held. Between two calls the first thread
sleeps, and the trial holds it then: it must not be held while it runs Python code.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

from ...errors import LiveshiftError
from ..hold import SERVICE
from .memory import FastPathMemory

GIVEN, KEPT = 0x5EED1E55, 0x0DDBA11
"""The value in each word of the memory that is handed over (GIVEN), and of the rest (KEPT)."""

PAUSE_S = 0.02
"""Between two calls of CUDA."""

_PR_SET_NAME = 15


class Rank:
    """The process's memory: some stays with the driver, and some is given away."""

    def __init__(self, uuid: str) -> None:
        self.memory = FastPathMemory(uuid)
        self.kept, self.given = self.memory.allocate(), self.memory.reserve()
        handle = self.memory.create()
        self.memory.map(self.given, handle)
        self.memory.fill(self.given, GIVEN)
        self.memory.cuda.release(handle)
        self.rounds = 0
        """How many rounds the thread that calls CUDA has made."""

    def call(self) -> NoReturn:
        """Give the GPU work and wait for it, without end."""
        while True:
            self.memory.fill(self.kept, KEPT)
            if not self.memory.holds(self.given, GIVEN):
                raise LiveshiftError("memory that was given away and came back has other bytes")
            self.rounds += 1
            time.sleep(PAUSE_S)

    def serve(self, peer: socket.socket) -> None:
        """Obey the trial, which sends one word for each order, until it closes the socket."""
        cuda = self.memory.cuda
        self.memory.enter()
        peer.sendall(b"made")
        while word := peer.recv(16):
            if word == b"give":
                handle = cuda.handle_at(self.given)
                descriptor = cuda.descriptor_of(handle)
                self.memory.unmap(self.given, handle)
                socket.send_fds(peer, [b"given"], [descriptor])
                os.close(descriptor)
            elif word == b"take":
                peer.sendall(b"ready")
                _, (descriptor,), _, _ = socket.recv_fds(peer, 16, 1)
                handle = cuda.import_descriptor(descriptor)
                self.memory.map(self.given, handle)
                cuda.release(handle)
                os.close(descriptor)
                right = self.memory.holds(self.given, GIVEN)
                peer.sendall(b"right" if right else b"wrong")
            else:
                before = self.rounds
                while self.rounds < before + 2:
                    os.sched_yield()
                peer.sendall(b"right" if self.memory.holds(self.kept, KEPT) else b"wrong")


def main(uuid: str, peer: socket.socket) -> None:
    """Run the process. If a call fails, it ends; the error is on standard error."""
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
