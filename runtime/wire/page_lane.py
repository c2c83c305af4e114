# SPDX-License-Identifier: Apache-2.0
"""One of the lanes for pages at its source: what goes over it is sealed here, by our own threads.

A thread that has read a chunk also seals it (:meth:`PageLane.seal`), while the chunk lies in that
processor's cache; the thread that owns the lane sends it. libzmq only carries it (mechanism NULL).
An answer that does not open is ignored. Should the destination have lost the key, it says so on
lane 0, where CURVE proves who speaks.
"""

from __future__ import annotations

import struct
import threading
from collections import deque

import msgspec
import xxhash
import zmq

from ...errors import LiveshiftError, StepFailed
from .compression import Compressor
from .header import CHUNK, HEADER, MEMORY, Kind, PageHeader, read_answer
from .lane import Destination, Lane, Pending
from .seal import TAG, Opener, Sealer, Unsealed

LANE_WINDOW = 16
"""Chunks in flight on each lane."""

ANSWER = struct.Struct(">Q")
"""The number that an answer is sealed under stands before it."""

BUFFER = CHUNK + TAG


class Buffers:
    """Where sealed chunks lie until they are acknowledged. The buffer used last is given out next:
    part of it may still be in the processor's cache. From any thread."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(BUFFER))

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)


class PageLane(Lane):
    """Lane ``index``, from 1 on, with a sealer and a compressor of its own."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], to: Destination, index: int, key: bytes,
        compressor: Compressor, buffers: Buffers,
    ) -> None:  # fmt: skip
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        # One of the context's threads each, in turn: left to itself libzmq gives all to the first.
        socket.affinity = 1 << (index % context.get(zmq.IO_THREADS))
        socket.setsockopt(zmq.MAXMSGSIZE, HEADER)
        super().__init__(to, socket, LANE_WINDOW)
        self.index = index
        self.bytes = 0
        """Of memory that were sealed."""
        self.hash = xxhash.xxh3_64()
        """Of the tags of these chunks, in their order."""
        self._order = threading.Lock()
        self._sealed: deque[tuple[bytes, memoryview]] = deque()
        self._numbered = 0  # how many were sealed
        self._sealer, self._opener = Sealer(key, "pages"), Opener(key, "answers")
        self._compressor = compressor
        self._buffers = buffers
        self._last_answer = -1
        self._answer = memoryview(bytearray(HEADER))

    def seal(self, kind: Kind, data: bytes | memoryview, link_rate: float = 0.0) -> None:
        """Seal one chunk, the lane's next, from any thread; ``data`` is not read after that.

        ``link_rate``: as :meth:`Compressor.squeeze` takes it, for chunks of memory.
        """
        with self._order:
            size, raw = len(data), 0
            if kind == MEMORY and size:
                data, raw = self._compressor.squeeze(data, link_rate)
            made = PageHeader(self._to.migration, self.index, self._numbered, kind, raw)
            header = msgspec.msgpack.encode(made)
            buffer = self._buffers.take()
            sealed = self._sealer.seal(self.index, self._numbered, header, data, buffer)
            self._numbered += 1
            if kind == MEMORY:
                self.bytes += size
                self.hash.update(sealed[-TAG:])
            self._sealed.append((header, sealed))

    def send_sealed(self) -> None:
        """Send what was sealed so far. The owner of all lanes lets a chunk be sealed only where
        there is credit for it."""
        while self._sealed:
            self._send(*self._sealed.popleft())

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
            return  # not authentic
        if number <= self._last_answer:
            return  # replayed
        self._last_answer = number
        try:
            answer = read_answer(said)
        except LiveshiftError as error:
            raise StepFailed("ship", f"{self._to.name} answers wrongly: {error}") from error
        self._answered(*answer)
