# SPDX-License-Identifier: Apache-2.0
"""The source's end of one lane: a connection whose chunks arrive once each and in their order.

Nothing here blocks. Whoever owns a lane waits for its socket, calls :meth:`Lane.hear` when
something has come, and :meth:`Lane.check` at least every TICK_MS.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash
import zmq

from ...errors import LiveshiftError, StepFailed
from .. import keys
from .header import CHUNK, HEADER, OVERHEAD, WANTS, Header, read_answer
from .wants import number_of

SEND_AGAIN_S = 2.0
GIVE_UP_S = 10.0
"""Of silence from a destination that owes acknowledgements: meanwhile the job stands still."""

TICK_MS = 200


@dataclass(frozen=True)
class Destination:
    """Whom a migration's image goes to: where it listens, and the keys on both sides.

    ``patience``: seconds of silence (GIVE_UP_S) after which it is given up.
    """

    migration: str
    endpoint: str
    name: str
    own: keys.KeyPair
    public: bytes
    patience: float

    @classmethod
    def of(
        cls, migration: str, endpoint: str, key_directory: Path, host: str, destination: str,
        patience: float | None = None,
    ) -> Destination:  # fmt: skip
        """As ``host`` may reach it; raises like the functions of keys.py."""
        own = keys.load_private(key_directory, host)
        public = keys.public_keys(key_directory)[destination]
        patience = GIVE_UP_S if patience is None else patience
        return cls(migration, endpoint, destination, own, public, patience)


class Pending(NamedTuple):
    """A chunk that is not acknowledged; ``release`` is to be called once it is."""

    number: int
    header: bytes
    data: bytes | memoryview
    release: Callable[[], None] | None


class Lane:
    """Chunks are numbered from 0. ``window``: how many may be pending (:attr:`credit`)."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], to: Destination, index: int, window: int
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = to.public
        self.socket.curve_secretkey, self.socket.curve_publickey = to.own.secret, to.own.public
        self.socket.linger = 0
        # One of the context's threads each, in turn: left to itself libzmq gives all to the first.
        self.socket.affinity = 1 << (index % context.get(zmq.IO_THREADS))
        self.socket.sndhwm = 2 * window
        self.socket.setsockopt(zmq.MAXMSGSIZE, (HEADER if index else CHUNK) + OVERHEAD)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.pending: deque[Pending] = deque()
        self.acknowledged = 0  # bytes, as they went over the wire
        self._to = to
        self.index = index
        self.connected = False
        self._window = window
        self._number = 0
        self._heard = self._sent_again = time.monotonic()
        self._asked = -1
        self._questions = 0
        self._question: bytes | None = None  # the header of one that is not answered
        self.answer: bytes | None = None
        """To the last question (wants.py), once it has come."""

    def connect(self) -> None:
        self.socket.connect(self._to.endpoint)
        self.connected = True

    @property
    def credit(self) -> int:
        """Chunks that may be sent now."""
        return self._window - len(self.pending) if self.connected else 0

    def send(
        self, stream: str, data: bytes | memoryview, raw: int = 0,
        release: Callable[[], None] | None = None,
    ) -> int:  # fmt: skip
        """Send one chunk whose memory stays as it is until ``release``; returns its digest."""
        digest = xxhash.xxh3_64_intdigest(data)
        header = Header(self._to.migration, self._number, stream, digest, self.index, raw)
        if not self.pending:
            self._heard = time.monotonic()
        chunk = Pending(self._number, msgspec.msgpack.encode(header), data, release)
        self.pending.append(chunk)
        self._put(chunk)
        self._number += 1
        return digest

    def ask(self) -> None:
        """Ask what the destination wants; :attr:`answer` will say it."""
        self._questions += 1
        header = Header(self._to.migration, self._questions, WANTS, 0, self.index)
        if not self.pending:
            self._heard = time.monotonic()
        self.answer, self._question = None, msgspec.msgpack.encode(header)
        self._put_question()

    def hear(self) -> None:
        """Take all answers that have come.

        Raises StepFailed when the destination refuses, or says what none would.
        """
        while True:
            try:
                kind, value = read_answer(self.socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            except LiveshiftError as error:
                raise StepFailed("ship", f"{self._to.name} sent {error}") from error
            self._heard = time.monotonic()
            if kind == "ack" and isinstance(value, int):
                while self.pending and self.pending[0].number <= value:
                    self._settled(self.pending.popleft())
            elif kind == "again" and isinstance(value, int):
                if value != self._asked:  # every chunk behind a missing one asks for it
                    self._asked = value
                    self._again(value)
            elif kind == "wants" and isinstance(value, bytes):
                if self._question is not None and number_of(value) == self._questions:
                    self.answer, self._question = value, None
            else:
                raise StepFailed("ship", f"{self._to.name} refused the image: {value!s:.500}")

    def check(self, until: float) -> None:
        """Send again what was lost with a connection that broke.

        Raises StepFailed after ``until`` (monotonic seconds), or too long a silence.
        """
        if not self.pending and self._question is None:
            return
        now = time.monotonic()
        if now > until:
            raise StepFailed("ship", f"{self._to.name} has not taken the image in time")
        patience = self._to.patience
        if now - self._heard > patience:
            raise StepFailed("ship", f"{self._to.name} has taken no image bytes for {patience:g} s")
        if now - max(self._heard, self._sent_again) > min(SEND_AGAIN_S, patience / 4):
            self._again(self.pending[0].number if self.pending else self._number)

    def close(self) -> None:
        """What is pending stays so: its memory is free once the context has ended."""
        self.socket.close()

    def _settled(self, chunk: Pending) -> None:
        self.acknowledged += len(chunk.data)
        if chunk.release is not None:
            chunk.release()

    def _again(self, number: int) -> None:
        self._sent_again = time.monotonic()
        for chunk in self.pending:
            if chunk.number >= number:
                self._put(chunk)
        self._put_question()

    def _put_question(self) -> None:
        if self._question is not None:
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart([self._question, b""], zmq.DONTWAIT)

    def _put(self, chunk: Pending) -> None:
        """Never blocks: where nobody takes them, chunks would fill the queue. They stay pending."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([chunk.header, chunk.data], zmq.DONTWAIT, copy=False)
