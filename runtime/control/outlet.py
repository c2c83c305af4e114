# SPDX-License-Identifier: Apache-2.0
"""Control sockets' limits, and sending that never waits: a slow peer is its own trouble only.

A frame, the frames that wait to be taken from a peer, and those that wait for it to take them are
bounded; only the parts of one unfinished message are not, which libzmq keeps to itself.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import zmq
import zmq.asyncio

from .line import Send

HEARTBEAT_MS = 1000
"""ZMTP heartbeat: a connection whose peer is gone is closed after a few of these."""
TO_ORCHESTRATOR = 8 << 20
FROM_ORCHESTRATOR = 64 << 20
"""Bytes of the longest frame either way; a longer one costs the sender its connection."""
WAITING_IN = 32
"""Frames that wait to be taken from one peer; TCP then holds the rest back."""
WAITING_OUT = 1000
"""Frames that wait for one peer to take them; it gets no more until it has taken some …"""
HEAVY = 64 << 10
WAITING_BYTES = FROM_ORCHESTRATOR
"""… and of those longer than HEAVY bytes, so many bytes together."""


class Weight:
    """Long frames on their way to one holder of a key, over however many connections."""

    def __init__(self) -> None:
        self._frames: list[tuple[zmq.MessageTracker, int]] = []

    def admit(self, size: int) -> None:
        """Raises zmq.Again while there is too much for another ``size`` bytes."""
        self._frames = [frame for frame in self._frames if not frame[0].done]
        if self._frames and size + sum(n for _, n in self._frames) > WAITING_BYTES:
            raise zmq.Again

    def add(self, tracker: zmq.MessageTracker, size: int) -> None:
        self._frames.append((tracker, size))


def outlet(socket: zmq.asyncio.Socket, identity: bytes | None, weight: Weight) -> Send:
    """Sends frames to one connection of a ROUTER, or over a DEALER (identity None)."""
    address = [] if identity is None else [identity]

    def send(raw: bytes) -> None:
        long = len(raw) > HEAVY
        if long:
            weight.admit(len(raw))
        sent = socket.send_multipart([*address, raw], zmq.DONTWAIT, copy=not long, track=long)
        # With DONTWAIT it is done, one way or the other.
        tracker = cast("asyncio.Future[zmq.MessageTracker | None]", sent).result()
        if long and tracker is not None:
            weight.add(tracker, len(raw))

    return send


def limit(socket: zmq.Socket[Any] | zmq.asyncio.Socket, *, longest: int) -> None:
    """What every control socket has in common; ``longest``: bytes of a frame that it takes."""
    socket.setsockopt(zmq.MAXMSGSIZE, longest)
    socket.setsockopt(zmq.RCVHWM, WAITING_IN)
    socket.setsockopt(zmq.SNDHWM, WAITING_OUT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.LINGER, 0)
