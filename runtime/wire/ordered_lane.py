# SPDX-License-Identifier: Apache-2.0
"""Lane 0 at its source, over CURVE: chunks in order, and questions beside them."""

from __future__ import annotations

import msgspec
import xxhash
import zmq

from ...errors import LiveshiftError, StepFailed
from .header import CHUNK, OVERHEAD, SEAL, WANTS, Header, read_answer
from .lane import ImageDestination, Lane
from .wants import number_of

WINDOW = 48
"""Lane 0 has at most this many chunks in flight. With CRIU's pipes of 1 MiB that is 48 MiB, far
above bandwidth × delay of a 25 Gbit/s link in one machine room."""


class OrderedLane(Lane):
    """Lane 0 at its source. It has at most one open question at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], to: ImageDestination) -> None:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.curve_serverkey = to.public
        socket.curve_secretkey, socket.curve_publickey = to.own.secret, to.own.public
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + OVERHEAD)
        super().__init__(to, socket, WINDOW)
        self._questions = 0
        self._question: tuple[bytes, bytes] | None = None  # the question that has no answer yet
        self.answer: int | bytes | None = None
        """The answer to the last question; None until it has come."""

    @property
    def credit(self) -> int:
        """The number of chunks that may be sent now."""
        return WINDOW - len(self.pending)

    @property
    def waits(self) -> bool:
        return bool(self.pending) or self._question is not None

    def send(self, stream: str, data: bytes | memoryview) -> None:
        """Send one chunk. The caller must not change its memory afterwards."""
        digest = xxhash.xxh3_64_intdigest(data)
        header = Header(self._to.migration, self._number, stream, digest)
        self._send(msgspec.msgpack.encode(header), data)

    def send_question(self, what: str, data: bytes = b"") -> None:
        """Ask the destination WANTS or SEAL; :attr:`answer` will hold the answer."""
        self._begin_to_wait()
        self._questions += 1
        digest = xxhash.xxh3_64_intdigest(data)
        header = Header(self._to.migration, self._questions, what, digest)
        self.answer, self._question = None, (msgspec.msgpack.encode(header), data)
        self._put(*self._question, copy=True)

    def drop_question(self) -> None:
        """Forget the question, because the caller does not wait for its answer any more."""
        self._question = None

    def _again(self, number: int) -> None:
        super()._again(number)
        if self._question is not None:
            self._put(*self._question, copy=True)

    def _read(self, raw: bytes) -> None:
        try:
            kind, value = read_answer(raw)
        except LiveshiftError as error:
            raise StepFailed("ship", f"{self._to.name} sent an invalid answer: {error}") from error
        if kind == WANTS and isinstance(value, bytes):
            self._replied(number_of(value), value)
        elif kind == SEAL and isinstance(value, int):
            self._replied(value, value)
        else:
            self._answered(kind, value)

    def _replied(self, number: int, answer: int | bytes) -> None:
        self._heard_answer()
        if self._question is not None and number == self._questions:
            self.answer, self._question = answer, None
