# SPDX-License-Identifier: Apache-2.0
"""Limits of control sockets, and sending that never waits, so that a slow peer delays no other.

The size of a frame is bounded, and so are the frames that wait in either direction. One thing is
not bounded: the parts of an unfinished message, which libzmq holds internally.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import zmq
import zmq.asyncio

from .connection import Send

HEARTBEAT_MS = 1000
"""Milliseconds between ZMTP heartbeats. A dead peer's connection closes after five of them."""
TO_ORCHESTRATOR = 8 << 20
FROM_ORCHESTRATOR = 64 << 20
"""Bytes of the longest frame to and from the orchestrator. A longer frame costs its sender the
connection."""
WAITING_IN = 32
"""At most this many frames of one peer wait to be read; TCP holds back the rest."""
WAITING_OUT = 1000
"""At most this many frames wait for one peer to read them. Sending to it then fails."""
HEAVY = 64 << 10
WAITING_BYTES = FROM_ORCHESTRATOR
"""Frames above HEAVY bytes that wait for one peer have at most this many bytes together."""


class Weight:
    """The long frames on their way to one holder of a key, over all its connections."""

    def __init__(self) -> None:
        self._frames: list[tuple[zmq.MessageTracker, int]] = []

    def admit(self, size: int) -> None:
        """Raises zmq.Again if another ``size`` bytes would exceed WAITING_BYTES."""
        self._frames = [frame for frame in self._frames if not frame[0].done]
        if self._frames and size + sum(n for _, n in self._frames) > WAITING_BYTES:
            raise zmq.Again

    def add(self, tracker: zmq.MessageTracker, size: int) -> None:
        self._frames.append((tracker, size))


def send_queue(socket: zmq.asyncio.Socket, identity: bytes | None, weight: Weight) -> Send:
    """Make the function that sends to one connection of a ROUTER, or over a DEALER (None)."""
    address = [] if identity is None else [identity]

    def send(raw: bytes) -> None:
        long = len(raw) > HEAVY
        if long:
            weight.admit(len(raw))
        sent = socket.send_multipart([*address, raw], zmq.DONTWAIT, copy=not long, track=long)
        # With DONTWAIT the future is complete at once, with a result or an error.
        tracker = cast("asyncio.Future[zmq.MessageTracker | None]", sent).result()
        if long and tracker is not None:
            weight.add(tracker, len(raw))

    return send


def limit(socket: zmq.Socket[Any] | zmq.asyncio.Socket, *, longest: int) -> None:
    """Set the options of every control socket. ``longest``: bytes of a frame that it accepts."""
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.RCVHWM, WAITING_IN)
    socket.setsockopt(zmq.SNDHWM, WAITING_OUT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.LINGER, 0)
