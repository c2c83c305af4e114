# SPDX-License-Identifier: Apache-2.0
"""The source's end of one lane: a connection whose chunks arrive once each and in their order.

The ordered lane (sender.py) and the lanes for pages (page_lane.py) have this code in common; each
brings its own socket. Nothing here blocks. The owner of a lane waits for its socket, calls
:meth:`Lane.read_answers` when an answer has come, and :meth:`Lane.check` at least every TICK_MS.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from ...errors import StepFailed
from ..control.keys import KeyPair
from .silence import Silence

SEND_AGAIN_S = 2.0
TICK_MS = 200


@dataclass(frozen=True)
class ImageDestination:
    """The destination of a migration's image: its endpoint, and the keys of both sides.

    ``patience``: seconds for which a destination may be silent while acknowledgements are pending.
    The job may be frozen meanwhile, so this must be short. ``silence``: of all lanes together; a
    snapshot limits it further.
    """

    migration: str
    endpoint: str
    name: str
    own: KeyPair
    public: bytes
    patience: float
    silence: Silence = field(default_factory=Silence, compare=False)


class Pending(NamedTuple):
    """A chunk that the destination has not acknowledged yet."""

    number: int
    header: bytes
    body: bytes | memoryview


class Lane:
    """One lane. Chunks are numbered from 0. ``window``: the most chunks that may be pending."""

    def __init__(self, to: ImageDestination, socket: zmq.Socket[bytes], window: int) -> None:
        self.socket = socket
        socket.linger = 0
        socket.sndhwm = 2 * window
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.pending: deque[Pending] = deque()
        self.acknowledged = 0  # bytes, counted as they went over the wire
        self.connected = False
        self._to = to
        self._number = 0  # the number of the next chunk
        self._heard = self._sent_again = time.monotonic()
        self._looked = self._silent_since = self._heard
        self._asked = -1

    def connect(self, endpoint: str) -> None:
        self.socket.connect(endpoint)
        self.connected = True

    @property
    def waits(self) -> bool:
        """Whether an answer of the destination is pending."""
        return bool(self.pending)

    def read_answers(self) -> int:
        """Take all answers that have come; return how many chunks they acknowledged.

        Raises StepFailed when the destination refuses, or sends an invalid answer.
        """
        before = len(self.pending)
        self._look()
        while True:
            try:
                raw = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return before - len(self.pending)
            self._read(raw)

    def check(self, until: float) -> bool:
        """Send again the chunks that a broken connection lost; return whether that was necessary.

        Raises StepFailed after ``until`` (monotonic seconds), or after too long a silence.
        """
        if not self.waits:
            return False
        now = time.monotonic()
        if now > until:
            raise StepFailed(
                "ship",
                f"{self._to.name} has not acknowledged the last {len(self.pending)} chunks in time",
                hint="use a faster link, or raise timeouts.freeze: `liveshift events` has the rate",
            )
        patience = self._to.patience
        if now - self._heard > patience:
            raise self._silent_for(patience)
        if self._to.silence.too_long(self._silent_since):
            raise self._silent_for(self._to.silence.limit)
        due = now - max(self._heard, self._sent_again) > min(SEND_AGAIN_S, patience / 4)
        if due:
            self._again(self.pending[0].number if self.pending else self._number)
        return due

    def close(self) -> None:
        """Close the socket. Pending chunks stay in memory until the ZeroMQ context has ended."""
        self.socket.close()

    def _read(self, raw: bytes) -> None:
        """Read one message, and pass its answer to :meth:`_answered`."""
        raise NotImplementedError

    def _silent_for(self, seconds: float) -> StepFailed:
        return StepFailed("ship", f"{self._to.name} has taken no image bytes for {seconds:.3g} s")

    def _answered(self, kind: str, value: int | str | bytes) -> None:
        self._heard_answer()
        if kind == "ack" and isinstance(value, int):
            while self.pending and self.pending[0].number <= value:
                self._settled(self.pending.popleft())
        elif kind == "again" and isinstance(value, int):
            if value != self._asked:  # each chunk behind a missing one asks for it; send once
                self._asked = value
                self._again(value)
        else:
            raise StepFailed("ship", f"{self._to.name} refused the image: {value!s:.500}")

    def _settled(self, chunk: Pending) -> None:
        self.acknowledged += len(chunk.body)

    def _send(self, header: bytes, body: bytes | memoryview) -> None:
        self._begin_to_wait()
        chunk = Pending(self._number, header, body)
        self.pending.append(chunk)
        self._number += 1
        # No copy: nothing writes to this memory until it is acknowledged. libzmq is done then.
        self._put(chunk.header, chunk.body, copy=False)

    def _begin_to_wait(self) -> None:
        if not self.waits:
            self._heard_now()

    def _heard_answer(self) -> None:
        self._to.silence.heard(self._silent_since)
        self._heard_now()

    def _heard_now(self) -> None:
        self._heard = self._silent_since = self._looked = time.monotonic()

    def _look(self) -> None:
        """Count at most one tick of the time since the last look as silence: an answer may have
        come at any moment of it. At lane 0 nobody looks while the source has nothing to send."""
        now = time.monotonic()
        self._silent_since += max(0.0, now - self._looked - TICK_MS / 1000)
        self._looked = now

    def _again(self, number: int) -> None:
        self._sent_again = time.monotonic()
        for chunk in self.pending:
            if chunk.number >= number:
                # The acknowledgement of the first copy may come while libzmq still sends this one.
                self._put(chunk.header, chunk.body, copy=True)

    def _put(self, header: bytes, body: bytes | memoryview, copy: bool) -> None:
        """Give a chunk to libzmq, without blocking. If libzmq's queue is full, it stays pending."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([header, body], zmq.DONTWAIT, copy=copy)
