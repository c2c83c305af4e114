# SPDX-License-Identifier: Apache-2.0
"""The destination's port for pages. libzmq transports them (mechanism NULL); seals protect them.

Any program that can send from the address of a host of the cluster can send here. So the port drops
a chunk that does not open under the key that the announced source has sent over lane 0 (seal.py),
and does not answer it. A chunk that opens was sealed by that source, for this migration, lane and
number. The port takes each number only once.

One thread owns the socket. It hands all chunks of one lane to the same worker. The worker opens the
chunk, stores it and makes the answer. The thread with the socket sends the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ... import background
from ...cores import threads
from ...errors import LiveshiftError
from ..control.keyring import KnownKeys
from .announced import Announced
from .answer_queue import AnswerQueue
from .dead_peers import end_dead_peers
from .header import CHUNK, PageHeader, read_page_header
from .page_lane import LANE_WINDOW
from .seal import TAG

log = logging.getLogger("liveshift.wire")

IO_THREADS = 4
"""At most this many of libzmq's threads read; each connection belongs to one of them."""

WORKERS = 8
"""At most this many threads open and store chunks. More would only share the memory bandwidth."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc: malloc.h


_Chunk = tuple[PageHeader, list[zmq.Frame]]


class PagePort:
    """One socket, and the threads behind it, for the pages of all migrations.

    ``hosts``: the addresses that may connect. ``find``: returns the announced migration of that
    name, or None. ``known``: returns whose key it is now.
    """

    def __init__(
        self,
        address: str,
        hosts: Iterable[str],
        find: Callable[[str], Announced | None],
        known: KnownKeys,
    ) -> None:
        self.address = address
        self._hosts, self._find, self._known = hosts, find, known
        # For each worker: its chunks. A full queue makes the thread with the socket wait for it.
        self._chunks: list[queue.Queue[_Chunk | None]] = [
            queue.Queue(LANE_WINDOW) for _ in range(threads(WORKERS))
        ]
        self._workers: list[threading.Thread] = []
        self._complained = 0.0

    def start(self) -> None:
        """Bind the port and start the threads; raises LiveshiftError if the port is taken."""
        keep_freed_memory()
        self._context = context = zmq.Context(io_threads=threads(IO_THREADS))
        self._auth = ThreadAuthenticator(context)
        self._auth.start()
        self._auth.allow(*self._hosts)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        socket.zap_domain = b"pages"  # without a domain libzmq does not ask ZAP about NULL
        socket.linger = 0
        socket.rcvhwm = 2 * LANE_WINDOW
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + TAG)
        end_dead_peers(socket)
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for pages on {self.address}: {error}") from error
        self._answers = AnswerQueue()
        for number, chunks in enumerate(self._chunks):
            name = f"pages-{number}"
            worker = threading.Thread(target=self._work, args=(chunks,), name=name, daemon=True)
            self._workers.append(worker)
            worker.start()
        threading.Thread(target=self._run, args=(socket,), name="pages", daemon=True).start()

    def close(self) -> None:
        """Take nothing more, and release the port."""
        self._auth.stop()
        self._context.term()

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._answers.fd, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if socket in ready:
                    self._take(socket)
                self._answers.send(socket)
        except zmq.ContextTerminated:
            for chunks in self._chunks:
                chunks.put(None)
            for worker in self._workers:  # they take all chunks that they were given
                worker.join()
            self._answers.close()
            socket.close()

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        """Hand on at most LANE_WINDOW chunks to workers. Then the caller sends answers again."""
        for _ in range(LANE_WINDOW):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                if len(frames) != 3:
                    raise LiveshiftError(f"a chunk came as {len(frames) - 1} frames, expected 2")
                header = read_page_header(frames[1].buffer)
            except LiveshiftError as error:
                self._complain(f"dropped what came to the port for pages: {error}")
                continue
            which = hash(header.migration) + header.lane
            self._chunks[which % len(self._chunks)].put((header, frames))

    def _work(self, chunks: queue.Queue[_Chunk | None]) -> None:
        """Open and store chunks, in the order in which they come, until None comes."""
        plain = memoryview(bytearray(CHUNK))
        while (chunk := chunks.get()) is not None:
            background.adopt()
            self._serve(*chunk, plain)
            del chunk  # give its memory back to libzmq

    def _serve(self, header: PageHeader, frames: list[zmq.Frame], plain: memoryview) -> None:
        """Take one chunk, which is opened into ``plain``, and let its answer be sent."""
        try:
            answer = self._answer(header, frames, plain)
        except LiveshiftError as error:
            self._complain(f"dropped what came to the port for pages: {error}")
        except Exception:  # one peer's bad chunk must not stop the other migrations
            log.exception("dropped a chunk")
        else:
            self._answers.put(frames[0].bytes, answer)

    def _answer(self, header: PageHeader, frames: list[zmq.Frame], plain: memoryview) -> bytes:
        """Open and store one chunk; raises LiveshiftError where the port must not answer."""
        beside, sealed = frames[1].buffer, frames[2].buffer
        entry = self._find(header.migration)
        seal = entry.seal if entry is not None else None
        if entry is None or seal is None:
            raise LiveshiftError(f"pages came for {header.migration!a}, which was not announced")
        data = seal.opener.open(header.lane, header.number, beside, sealed, plain)
        if self._known.name_of(seal.speaker) != entry.source:
            raise LiveshiftError(f"pages came from {entry.source}, whose key is no longer valid")
        kind, value = entry.take_page(seal, header, data, bytes(sealed[-TAG:]))
        return seal.answer(header.lane, kind, value)

    def _complain(self, text: str) -> None:
        """Log an error, at most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed chunks (libzmq's, 1 MiB each). By default glibc gives it
    back to the kernel and gets it again page by page: a third of the CPU time of receiving."""
    with contextlib.suppress(AttributeError, OSError):  # musl and others have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TOP_PAD, 16 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)
