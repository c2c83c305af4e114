# SPDX-License-Identifier: Apache-2.0
"""One of the lanes for pages at its source: what goes over it is sealed here, by our own threads.

libzmq only carries it (mechanism NULL). Whatever does not open is not heard: the destination may
have forgotten the key, and then it says so on lane 0, which knows who speaks.
"""

from __future__ import annotations

import struct

import msgspec
import zmq

from ...errors import LiveshiftError, StepFailed
from .header import CHUNK, HEADER, Kind, PageHeader, read_answer
from .lane import Destination, Lane, Pending
from .seal import TAG, Opener, Sealer, Unsealed

LANE_WINDOW = 16
"""Chunks in flight on each lane."""

ANSWER = struct.Struct(">Q")
"""The number that an answer is sealed under stands before it."""

BUFFER = CHUNK + TAG


class Buffers:
    """Where sealed chunks lie until they are acknowledged. The one used last is the next: some of
    it may be in the processor's cache still."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        return self._free.pop() if self._free else memoryview(bytearray(BUFFER))

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)


class PageLane(Lane):
    """Lane ``index``, from 1 on. ``sealer`` and ``opener`` serve all lanes of a source."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], to: Destination, index: int,
        sealer: Sealer, opener: Opener, buffers: Buffers,
    ) -> None:  # fmt: skip
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        # One of the context's threads each, in turn: left to itself libzmq gives all to the first.
        socket.affinity = 1 << (index % context.get(zmq.IO_THREADS))
        socket.setsockopt(zmq.MAXMSGSIZE, HEADER)
        super().__init__(to, socket, LANE_WINDOW)
        self.index = index
        self._sealer, self._opener = sealer, opener
        self._buffers = buffers
        self._last_answer = -1
        self._answer = memoryview(bytearray(HEADER))

    def send(self, kind: Kind, data: bytes | memoryview, raw: int = 0) -> bytes:
        """Seal one chunk and send it; returns its tag. ``data`` is not read after that."""
        number = self._number
        made = PageHeader(self._to.migration, self.index, number, kind, raw)
        header = msgspec.msgpack.encode(made)
        sealed = self._sealer.seal(self.index, number, header, data, self._buffers.take())
        self._send(header, sealed)
        return bytes(sealed[-TAG:])

    def _settled(self, chunk: Pending) -> None:
        self.acknowledged += len(chunk.body) - TAG
        assert isinstance(chunk.body, memoryview)
        self._buffers.give_back(memoryview(chunk.body.obj))

    def _read(self, raw: bytes) -> None:
        try:
            (number,) = ANSWER.unpack_from(raw)
            said = self._opener.open(
                self.index, number, b"", memoryview(raw)[ANSWER.size :], self._answer
            )
        except (struct.error, Unsealed):
            return  # anybody's
        if number <= self._last_answer:
            return  # somebody's who has listened
        self._last_answer = number
        try:
            answer = read_answer(said)
        except LiveshiftError as error:
            raise StepFailed("ship", f"{self._to.name} answers wrongly: {error}") from error
        self._answered(*answer)
