# SPDX-License-Identifier: Apache-2.0
"""A host's end of the wire: takes the chunks of every migration that was announced to it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...errors import LiveshiftError
from .. import keys
from ..keyring import NOBODY, Known
from .compression import restore
from .header import (
    CHUNK,
    LANES,
    MEMORY,
    OVERHEAD,
    RATE,
    RATE_LIMIT,
    WANTS,
    Header,
    read_header,
)
from .sender import WINDOW
from .wants import pack_wants

log = logging.getLogger("liveshift.wire")

IO_THREADS = 4
"""Threads of libzmq's at most, which decrypt; each connection has one of them."""

Answer = tuple[str, int | str | bytes]


class Inlet(Protocol):
    """Where one migration's chunks on lane 0 go at the destination."""

    @property
    def complete(self) -> bool:
        """Whether all of the image is here; nothing is written after that."""

    def write(self, stream: str, data: memoryview) -> None:
        """Put bytes where they belong; empty bytes end the stream."""


class Pages(Protocol):
    """Where the chunks of the other lanes go (PageStreams is one)."""

    def write(self, lane: int, data: memoryview, digest: int) -> None:
        """Take one chunk in its lane's order, ``data`` as the source has it and ``digest`` that of
        its header; empty bytes end the lane's stream."""

    def wants(self) -> Iterable[tuple[int, int, int]]:
        """Which pages were only named and are not here: (inner pid, address, pages)."""


@dataclass
class _Migration:
    source: str
    inlet: Inlet
    limit: int
    pages: Pages | None
    expected: list[int]  # number of the next chunk, by lane
    bytes: int = 0
    ordered: int = 0  # bytes of lane 0
    measured: int = 0
    refused: str | None = None


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
        self._context = context = zmq.Context(io_threads=min(IO_THREADS, os.cpu_count() or 1))
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

    def close(self) -> None:
        """Take nothing more, and let go of the port."""
        self._auth.stop()
        self._context.term()

    def expect(
        self, migration: str, source: str, inlet: Inlet, limit_bytes: int,
        pages: Pages | None = None, lanes: int = 0,
    ) -> None:  # fmt: skip
        """Accept an image for a migration that the orchestrator announced.

        From that host only, and not more than ``limit_bytes`` over all the streams of lane 0. An
        inlet that is complete already (its agent was started anew) takes no more, and its sender,
        whose last chunks may have found no one to acknowledge them, is told that they are here.
        ``pages`` takes what comes as ``memory:k`` on lane k, 1 to ``lanes``, as often as it comes;
        without it no lane but 0 is taken.
        """
        assert lanes <= LANES
        expected = sys.maxsize if inlet.complete else 0
        entry = _Migration(
            source, inlet, limit_bytes, pages, [expected] * (1 + (lanes if pages else 0))
        )
        with self._lock:
            self._open[migration] = entry

    def forget(self, migration: str) -> None:
        with self._lock:
            self._open.pop(migration, None)

    def received(self, migration: str) -> int:
        """Bytes taken so far."""
        entry = self._open.get(migration)
        return entry.bytes if entry else 0

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                socket.close()
                return
            try:
                answer = self._answer(frames)
            except Exception:  # whatever a peer sends, the other migrations go on
                log.exception("dropped a chunk")
                continue
            with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                socket.send_multipart([frames[0].bytes, msgspec.msgpack.encode(answer)])

    def _answer(self, frames: list[zmq.Frame]) -> Answer:
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

    def _take(self, host: str, header: Header, data: memoryview) -> Answer:
        with self._lock:
            entry = self._open.get(header.migration)
        if entry is None or entry.source != host:
            raise LiveshiftError(
                f"{host} sent an image for {header.migration}, which is not expected"
            )
        if entry.refused is not None:
            return "refused", entry.refused
        if header.lane >= len(entry.expected):
            raise LiveshiftError(
                f"{host} sent lane {header.lane} of {header.migration}, which was not announced"
            )
        if header.stream == WANTS:
            return "wants", self._wants(entry, header, data)
        expected = entry.expected[header.lane]
        if header.number < expected:
            return "ack", expected - 1
        if header.number > expected or xxhash.xxh3_64_intdigest(data) != header.digest:
            return "again", expected
        try:
            self._put(entry, header, data)
        except Exception as error:
            if not isinstance(error, LiveshiftError):
                log.exception("cannot take the image of %s", header.migration)
            else:
                log.error("cannot take the image of %s: %s", header.migration, error)
            entry.refused = str(error)
            return "refused", entry.refused
        entry.expected[header.lane] += 1
        return "ack", header.number

    def _wants(self, entry: _Migration, header: Header, data: memoryview) -> bytes:
        if header.lane or data or entry.pages is None:
            raise LiveshiftError(f"a question that is none, on lane {header.lane}")
        return pack_wants(header.number, () if entry.inlet.complete else entry.pages.wants())

    def _put(self, entry: _Migration, header: Header, data: memoryview) -> None:
        """Raises whatever stands against it; then no more is taken for this migration."""
        lane = header.lane
        size = header.raw or len(data)
        if lane and header.stream == f"{RATE}:{lane}":
            entry.measured += size
            if entry.measured > RATE_LIMIT:
                raise LiveshiftError(f"more than {RATE_LIMIT} bytes have come only to measure with")
            return
        if lane and header.stream != f"{MEMORY}:{lane}":
            raise LiveshiftError(f"{header.stream[:200]!a} came on lane {lane}")
        if not lane and header.raw:
            raise LiveshiftError("a compressed chunk came on lane 0")
        if not lane and entry.ordered + size > entry.limit:
            raise LiveshiftError(
                f"more has come than the {entry.limit} bytes that were announced"
                f" for {header.migration}"
            )
        if header.raw:
            data = restore(data, header.raw)
        if lane and entry.pages is not None:
            entry.pages.write(lane, data, header.digest)
        else:
            entry.inlet.write(header.stream, data)
            entry.ordered += size
        entry.bytes += size

    def _complain(self, text: str) -> None:
        """At most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)
