# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ with CURVE.

A. sender → receiver   [header, bytes]     header = (migration, number, stream, xxh3-64 of bytes)
B. receiver → sender   ("ack", number)     the chunk is where it belongs: one credit comes back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends

Numbers grow by one and the receiver takes them in order only, so a chunk that is lost with a
broken connection, repeated or flipped is sent again and never written twice. The sender keeps
what is not acknowledged; at most WINDOW chunks, which is the credit.

An image is taken for a migration that was announced, from the host it was announced for and up to
the size that was announced; whatever else comes is answered with "refused", so that its sender
fails at once. The last stream is the manifest.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import xxhash
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..errors import LiveshiftError, StepFailed
from . import keys, manifest
from .link import NOBODY, Known
from .manifest import Manifest

log = logging.getLogger("liveshift.wire")

WINDOW = 48
"""Chunks in flight. With CRIU's pipes of 1 MiB that is 48 MiB, far above bandwidth × delay of a
25 Gbit/s link in one machine room."""

CHUNK = 1 << 20
"""Bytes of one chunk at most; a peer that sends more loses its connection."""

HEADER = 8192
"""Bytes of a header at most: a stream may be named after a path."""

OVERHEAD = 256
"""Bytes that CURVE and ZMTP may add to a chunk (33 with libzmq 4.3)."""

SEND_AGAIN_S = 2.0
GIVE_UP_S = 10.0
"""Of silence from a destination that owes acknowledgements: meanwhile the job stands still."""


class Inlet(Protocol):
    """Where one migration's chunks go at the destination."""

    @property
    def complete(self) -> bool:
        """Whether all of the image is here; nothing is written after that."""

    def write(self, stream: str, data: memoryview) -> None:
        """Put bytes where they belong; empty bytes end the stream."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk."""

    migration: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    number: Annotated[int, msgspec.Meta(ge=0)]
    stream: Annotated[str, msgspec.Meta(min_length=1, max_length=HEADER)]
    digest: Annotated[int, msgspec.Meta(ge=0)]


_headers = msgspec.msgpack.Decoder(Header)
_answers = msgspec.msgpack.Decoder(tuple[str, int | str])


def read_header(raw: bytes | memoryview) -> Header:
    """Raises LiveshiftError for bytes that are none."""
    if len(raw) > HEADER:
        raise LiveshiftError(f"a header of {len(raw)} bytes, at most {HEADER} are taken")
    try:
        return _headers.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"a header that is not understood: {error}") from error


def read_answer(raw: bytes | memoryview) -> tuple[str, int | str]:
    """Raises LiveshiftError for bytes that are none."""
    try:
        return _answers.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"an answer that is not understood: {error}") from error


@dataclass
class _Migration:
    source: str
    inlet: Inlet
    limit: int
    expected: int
    bytes: int = 0
    refused: str | None = None


class Sender:
    """The source's end for one migration. Threads may send at the same time, each its own streams.

    ``patience``: seconds of silence (GIVE_UP_S) after which it gives up. ``until`` (monotonic
    seconds) may be set: then what was sent must be acknowledged by that time.
    """

    until = float("inf")

    def __init__(
        self, migration: str, endpoint: str, key_directory: Path, host: str, destination: str,
        patience: float | None = None,
    ) -> None:  # fmt: skip
        own = keys.load_private(key_directory, host)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.public_keys(key_directory)[destination]
        self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
        self._socket.linger = 0
        self._socket.sndhwm = 2 * WINDOW
        self._socket.setsockopt(zmq.MAXMSGSIZE, HEADER + OVERHEAD)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(endpoint)
        self._patience = GIVE_UP_S if patience is None else patience
        self._migration = migration
        self._destination = destination
        self._number = 0
        self._pending: deque[tuple[int, bytes, bytes]] = deque()
        self._heard = time.monotonic()
        self._sent_again = self._heard
        self._asked = -1
        self.bytes = 0
        self.streams: dict[str, int] = {}
        self._hashes: dict[str, xxhash.xxh3_64] = {}
        self._ended: set[str] = set()
        self._turn = threading.Lock()

    def send(self, stream: str, data: bytes | memoryview) -> None:
        """Send bytes (empty: the stream ends); blocks while no credit is left.

        Raises StepFailed when the destination refuses, or stays silent for too long.
        """
        if not data:
            self._ended.add(stream)
            self._send(stream, b"")
        for at in range(0, len(data), CHUNK):
            # A chunk is kept until it is acknowledged; a view's memory is soon another's.
            self._send(stream, bytes(data[at : at + CHUNK]))

    def manifest_streams(self) -> dict[str, tuple[int, int]]:
        """Every stream so far, but for a manifest: (bytes, xxh3-64 of them)."""
        return {
            stream: (self.streams[stream], rolling.intdigest())
            for stream, rolling in self._hashes.items()
            if stream != manifest.STREAM
        }

    def send_manifest(
        self,
        capsule: str,
        image_bytes: int,
        pipes: Mapping[int, int],
        removed: Mapping[str, Iterable[str]],
    ) -> Manifest:
        """End what was not ended, and send the manifest of all that was sent.

        Once :meth:`finish` has returned, the image is complete at the destination. It may be so
        when this or finish raises, too: the answer may have been lost.
        """
        for stream in [s for s in self.streams if s not in self._ended]:
            self.send(stream, b"")
        found = Manifest(
            version=manifest.VERSION,
            migration=self._migration,
            capsule=capsule,
            image_bytes=image_bytes,
            streams=self.manifest_streams(),
            pipes=dict(pipes),
            removed=manifest.as_bytes(removed),
        )
        self.send(manifest.STREAM, manifest.encode(found))
        self.send(manifest.STREAM, b"")
        return found

    def _send(self, stream: str, data: bytes) -> None:
        with self._turn:
            self._put_in_line(stream, data)

    def _put_in_line(self, stream: str, data: bytes) -> None:
        digest = xxhash.xxh3_64_intdigest(data)
        header = msgspec.msgpack.encode(Header(self._migration, self._number, stream, digest))
        self._hashes.setdefault(stream, xxhash.xxh3_64()).update(data)
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
        with self._turn:
            while self._pending:
                self._hear(block=True)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _hear(self, block: bool) -> None:
        while self._socket.poll(200 if block else 0):
            try:
                kind, value = read_answer(self._socket.recv())
            except LiveshiftError as error:
                raise StepFailed("ship", f"{self._destination} sent {error}") from error
            self._heard = time.monotonic()
            block = False
            if kind == "ack" and isinstance(value, int):
                while self._pending and self._pending[0][0] <= value:
                    self._pending.popleft()
            elif kind == "again" and isinstance(value, int):
                if value != self._asked:  # every chunk behind a missing one asks for it
                    self._asked = value
                    self._again(value)
            else:
                raise StepFailed("ship", f"{self._destination} refused the image: {value}")
        now = time.monotonic()
        if self._pending and now > self.until:
            raise StepFailed("ship", f"{self._destination} has not taken the image in time")
        if self._pending and now - self._heard > self._patience:
            raise StepFailed(
                "ship", f"{self._destination} has taken no image bytes for {self._patience:g} s"
            )
        if self._pending and now - max(self._heard, self._sent_again) > min(
            SEND_AGAIN_S, self._patience / 4
        ):
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
    _complained: float = 0.0

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
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + OVERHEAD)
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for images on {self.address}: {error}") from error
        threading.Thread(target=self._run, args=(socket,), name="receive", daemon=True).start()

    def expect(self, migration: str, source: str, inlet: Inlet, limit_bytes: int) -> None:
        """Accept an image for a migration that the orchestrator announced.

        From that host only, and not more than ``limit_bytes`` over all of its streams. An inlet
        that is complete already (its agent was started anew) takes no more, and its sender, whose
        last chunks may have found no one to acknowledge them, is told that they are here.
        """
        expected = sys.maxsize if inlet.complete else 0
        with self._lock:
            self._open[migration] = _Migration(source, inlet, limit_bytes, expected)

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
                answer = self._answer(frames)
            except Exception:  # whatever a peer sends, the other migrations go on
                log.exception("dropped a chunk")
                continue
            with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                socket.send_multipart([frames[0].bytes, msgspec.msgpack.encode(answer)])

    def _answer(self, frames: list[zmq.Frame]) -> tuple[str, int | str]:
        host = self._known.owner(frames[-1])
        try:
            if len(frames) != 3:
                raise LiveshiftError(f"a chunk of {len(frames) - 1} frames")
            if host == NOBODY:
                raise LiveshiftError("a chunk from a key that is not known here any more")
            return self._take(host, read_header(frames[1].buffer), frames[2].buffer)
        except LiveshiftError as error:
            self._complain(f"dropped a chunk from {host}: {error}")
            return "refused", str(error)

    def _take(self, host: str, header: Header, data: memoryview) -> tuple[str, int | str]:
        with self._lock:
            entry = self._open.get(header.migration)
        if entry is None or entry.source != host:
            raise LiveshiftError(
                f"{host} sent an image for {header.migration}, which is not expected"
            )
        if entry.refused is not None:
            return "refused", entry.refused
        if header.number < entry.expected:
            return "ack", entry.expected - 1
        if header.number > entry.expected or xxhash.xxh3_64_intdigest(data) != header.digest:
            return "again", entry.expected
        if entry.bytes + len(data) > entry.limit:
            entry.refused = (
                f"more has come than the {entry.limit} bytes that were announced"
                f" for {header.migration}"
            )
            log.error("%s", entry.refused)
            return "refused", entry.refused
        try:
            entry.inlet.write(header.stream, data)
        except Exception as error:
            log.exception("cannot take the image of %s", header.migration)
            entry.refused = str(error)
            return "refused", entry.refused
        entry.expected += 1
        entry.bytes += len(data)
        return "ack", header.number

    def _complain(self, text: str) -> None:
        """At most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)
