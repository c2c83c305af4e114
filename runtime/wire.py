# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ with CURVE.

A. sender → receiver   [header, bytes]     header = (migration, number, stream, xxh3-64 of bytes)
B. receiver → sender   ("ack", number)     the chunk is where it belongs: one credit comes back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends

Numbers grow by one and the receiver takes them in order only, so a chunk that is lost with a
broken connection, repeated or flipped is sent again and never written twice. The sender keeps
what is not acknowledged; at most WINDOW chunks, which is the credit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgpack
import xxhash
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..errors import LiveshiftError, StepFailed
from . import keys
from .link import Known

log = logging.getLogger("liveshift.wire")

WINDOW = 48
"""Chunks in flight. With CRIU's pipes of 1 MiB that is 48 MiB, far above bandwidth × delay of a
25 Gbit/s link in one machine room."""

SEND_AGAIN_S = 2.0
GIVE_UP_S = 10.0
"""Of silence from a destination that owes acknowledgements: meanwhile the job stands still."""


class Inlet(Protocol):
    """Where one migration's chunks go at the destination."""

    def write(self, stream: str, data: memoryview) -> None:
        """Put bytes where they belong; empty bytes end the stream."""


@dataclass
class _Migration:
    source: str
    inlet: Inlet
    expected: int = 0
    bytes: int = 0
    refused: str | None = None


class Sender:
    """The source's end for one migration; for one thread at a time."""

    def __init__(
        self, migration: str, endpoint: str, key_directory: Path, host: str, destination: str
    ) -> None:
        own = keys.load_private(key_directory, host)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.public_keys(key_directory)[destination]
        self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
        self._socket.linger = 0
        self._socket.sndhwm = 2 * WINDOW
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(endpoint)
        self._migration = migration
        self._destination = destination
        self._number = 0
        self._pending: deque[tuple[int, bytes, bytes]] = deque()
        self._heard = time.monotonic()
        self._sent_again = self._heard
        self._asked = -1
        self.bytes = 0
        self.streams: dict[str, int] = {}

    def send(self, stream: str, data: bytes) -> None:
        """Send bytes (empty: the stream ends); blocks while no credit is left.

        Raises StepFailed when the destination refuses or stays silent for GIVE_UP_S.
        """
        header = bytes(
            msgpack.packb((self._migration, self._number, stream, xxhash.xxh3_64_intdigest(data)))
        )
        if not self._pending:
            self._heard = time.monotonic()
        self._pending.append((self._number, header, data))
        self._put(header, data)
        self._number += 1
        self.bytes += len(data)
        self.streams[stream] = self.streams.get(stream, 0) + len(data)
        self._hear(block=False)
        while len(self._pending) >= WINDOW:
            self._hear(block=True)

    def finish(self) -> None:
        """Return when the destination has acknowledged every chunk; raises like :meth:`send`."""
        while self._pending:
            self._hear(block=True)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _hear(self, block: bool) -> None:
        while self._socket.poll(200 if block else 0):
            kind, value = msgpack.unpackb(self._socket.recv())
            self._heard = time.monotonic()
            block = False
            if kind == "ack":
                while self._pending and self._pending[0][0] <= value:
                    self._pending.popleft()
            elif kind == "again":
                if value != self._asked:  # every chunk behind a missing one asks for it
                    self._asked = value
                    self._again(value)
            else:
                raise StepFailed("ship", f"{self._destination} refused the image: {value}")
        now = time.monotonic()
        if self._pending and now - self._heard > GIVE_UP_S:
            raise StepFailed(
                "ship", f"{self._destination} has taken no image bytes for {GIVE_UP_S:g} s"
            )
        if self._pending and now - max(self._heard, self._sent_again) > SEND_AGAIN_S:
            self._again(self._pending[0][0])  # lost with a connection that broke

    def _again(self, number: int) -> None:
        self._sent_again = time.monotonic()
        for at, header, data in self._pending:
            if at >= number:
                self._put(header, data)

    def _put(self, header: bytes, data: bytes) -> None:
        """Never blocks: where nobody takes them, chunks would fill the queue. They stay pending."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([header, data], zmq.DONTWAIT, copy=False)


@dataclass
class Receiver:
    """A host's end: one socket and one thread for all migrations that arrive here."""

    address: str
    key_directory: Path
    host: str
    _open: dict[str, _Migration] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Bind the data port and begin to take chunks; raises LiveshiftError if it is taken."""
        own = keys.load_private(self.key_directory, self.host)
        context = zmq.Context()
        self._auth = ThreadAuthenticator(context)
        self._auth.start()
        self._known = Known(self.key_directory)
        self._auth.configure_curve_callback(credentials_provider=self._known)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.linger = 0
        socket.rcvhwm = 2 * WINDOW
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for images on {self.address}: {error}") from error
        threading.Thread(target=self._run, args=(socket,), name="receive", daemon=True).start()

    def expect(self, migration: str, source: str, inlet: Inlet) -> None:
        """Accept an image for a migration that the orchestrator announced, from that host only."""
        with self._lock:
            self._open[migration] = _Migration(source, inlet)

    def forget(self, migration: str) -> None:
        with self._lock:
            self._open.pop(migration, None)

    def received(self, migration: str) -> int:
        """Bytes taken so far."""
        entry = self._open.get(migration)
        return entry.bytes if entry else 0

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            frames = socket.recv_multipart(copy=False)
            try:
                identity, header, payload = frames
                answer = self._take(header, payload)
            except Exception as error:  # whatever a peer sends, the other migrations go on
                log.error("dropped a chunk: %s", error)
                continue
            if answer is not None:
                with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                    socket.send_multipart([identity.bytes, msgpack.packb(answer)])

    def _take(self, header: zmq.Frame, payload: zmq.Frame) -> tuple[str, int | str] | None:
        migration, number, stream, digest = msgpack.unpackb(header.buffer)
        host = self._known.owner(header)
        with self._lock:
            entry = self._open.get(migration)
        if entry is None or entry.source != host:
            raise LiveshiftError(f"{host} sent an image for {migration}, which is not expected")
        if entry.refused is not None:
            return "refused", entry.refused
        if number < entry.expected:
            return "ack", entry.expected - 1
        data = payload.buffer
        if number > entry.expected or xxhash.xxh3_64_intdigest(data) != digest:
            return "again", entry.expected
        try:
            entry.inlet.write(stream, data)
        except Exception as error:
            log.exception("cannot take the image of %s", migration)
            entry.refused = str(error)
            return "refused", entry.refused
        entry.expected += 1
        entry.bytes += len(data)
        return "ack", number
