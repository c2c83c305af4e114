# SPDX-License-Identifier: Apache-2.0
"""Answers that several threads give, for the one thread that may use their socket."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

import zmq


class AnswerQueue:
    """``fd`` becomes readable when an answer waits. :meth:`put` may be called by any thread, also
    after :meth:`close`; the others only by the thread with the socket."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._lock = threading.Lock()

    def put(self, to: bytes, answer: bytes) -> None:
        """``to``: the identity that libzmq has given to the connection."""
        with self._lock:
            if self.fd >= 0:
                self._waiting.append((to, answer))
                os.eventfd_write(self.fd, 1)

    def send(self, socket: zmq.Socket[bytes]) -> None:
        """Send all that wait."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._waiting:
            with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                socket.send_multipart(self._waiting.popleft())

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1
