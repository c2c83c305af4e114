# SPDX-License-Identifier: Apache-2.0
"""One lane for pages at its source: our own threads seal the chunks that it carries.

A thread that has read a chunk also seals it (:meth:`PageLane.seal`), while the chunk is in that
processor's cache. The thread that owns the lane sends it. libzmq only transports it (mechanism
NULL). The lane ignores an answer that does not open. If the destination has lost the key, it says
so on lane 0, where CURVE proves who speaks.
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
from .header import CHUNK, DEVICE, HEADER, MEMORY, RATE, Kind, PageHeader, read_answer
from .lane import ImageDestination, Lane, Pending
from .seal import TAG, Opener, Sealer, Unsealed

LANE_WINDOW = 16
"""Each lane for pages has at most this many chunks in flight."""

ANSWER = struct.Struct(">Q")
"""The format of the number (nonce) under which an answer is sealed. It precedes the answer."""


class PageLane(Lane):
    """Lane ``index`` (from 1 on) at the source, with a sealer and a compressor of its own.

    ``free``: memory for sealed chunks, of all lanes, that holds none now. The buffer that was used
    last is taken first: part of it may still be in the cache.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        to: ImageDestination,
        index: int,
        key: bytes,
        compressor: Compressor,
        free: list[memoryview],
    ) -> None:
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        # Spread the lanes over libzmq's threads: by itself libzmq would give all to the first.
        socket.affinity = 1 << (index % context.get(zmq.IO_THREADS))
        socket.setsockopt(zmq.MAXMSGSIZE, HEADER)
        super().__init__(to, socket, LANE_WINDOW)
        self.index = index
        self.bytes = 0
        """Bytes of host memory that were sealed on this lane."""
        self.device_bytes = 0
        """Bytes of device memory that were sealed on this lane."""
        self.hash = xxhash.xxh3_64()
        """The xxh3-64 of the tags of the lane's chunks of memory, in their order."""
        self._order = threading.Lock()
        self._sealed: deque[tuple[bytes, memoryview]] = deque()
        self.numbered = 0
        """The number of chunks sealed so far."""
        self._sealer, self._opener = Sealer(key, "pages"), Opener(key, "answers")
        self._compressor = compressor
        self._free = free
        self._last_answer = -1
        self._answer = memoryview(bytearray(HEADER))

    def seal(
        self,
        kind: Kind,
        data: bytes | memoryview,
        link_rate: float = 0.0,
        process: int = 0,
        at: int = 0,
    ) -> None:
        """Seal one chunk as the lane's next, from any thread; ``data`` is not read after that.

        ``link_rate``: for chunks of host memory, the rate that :meth:`Compressor.squeeze` takes.
        ``process``, ``at``: as in PageHeader.
        """
        with self._order:
            size, raw = len(data), 0
            if kind == MEMORY and size:
                data, raw = self._compressor.squeeze(data, link_rate)
            number, name = self.numbered, self._to.migration
            made = PageHeader(name, self.index, number, kind, raw, process, at)
            header = msgspec.msgpack.encode(made)
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = memoryview(bytearray(CHUNK + TAG))
            sealed = self._sealer.seal(self.index, number, header, data, buffer)
            self.numbered += 1
            if kind == MEMORY:
                self.bytes += size
            elif kind == DEVICE:
                self.device_bytes += size
            if kind != RATE:
                self.hash.update(sealed[-TAG:])
            self._sealed.append((header, sealed))

    def send_sealed(self) -> None:
        """Send the chunks sealed so far. They fit into the window: the owner of the lanes lets a
        thread seal a chunk only where there is credit for it."""
        while self._sealed:
            self._send(*self._sealed.popleft())

    def _settled(self, chunk: Pending) -> None:
        self.acknowledged += len(chunk.body) - TAG
        assert isinstance(chunk.body, memoryview)
        self._free.append(memoryview(chunk.body.obj))

    def _read(self, raw: bytes) -> None:
        try:
            (number,) = ANSWER.unpack_from(raw)
            said = self._opener.open(
                self.index, number, b"", memoryview(raw)[ANSWER.size :], self._answer
            )
        except (struct.error, Unsealed):
            return  # not authentic: ignore
        if number <= self._last_answer:
            return  # replayed: ignore
        self._last_answer = number
        try:
            answer = read_answer(said)
        except LiveshiftError as error:
            raise StepFailed("ship", f"{self._to.name} sent an invalid answer: {error}") from error
        self._answered(*answer)
