# SPDX-License-Identifier: Apache-2.0
"""The destination's end of the wire: takes the chunks of every migration announced to this host.

One thread owns the socket of lane 0. It gives each chunk to the thread of its image
(image_worker.py), which stores it and makes the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...cores import threads
from ...errors import LiveshiftError
from ..control import keys
from ..control.keyring import NOBODY, KnownKeys
from .announced import Announced, Answer, Inlet
from .answer_queue import AnswerQueue
from .dead_peers import end_dead_peers
from .header import CHUNK, LANES, OVERHEAD, SEAL, WANTS, Header, read_header
from .image_worker import Chunk, ImageWorker
from .ordered_lane import WINDOW
from .page_port import PagePort
from .page_streams import PageStreams

log = logging.getLogger("liveshift.wire")

IO_THREADS = 4
"""At most this many of libzmq's threads decrypt; each connection belongs to one of them."""

BACKLOG = 4096
"""Up to this many connections may wait to be accepted. Hosts ask this port whether the kernel
answers, also while the agent is stopped and accepts none."""


class Receiver:
    """Lane 0 of all migrations that arrive here, with one socket, and a page port.

    ``address`` and ``pages``: the addresses of lane 0 and of the page port, "ADDRESS:PORT".
    ``hosts``: the addresses that pages may come from. ``clear``: pages may come in clear
    (wire.seal).
    """

    def __init__(
        self,
        address: str,
        pages: str,
        key_directory: Path,
        host: str,
        hosts: Iterable[str],
        *,
        clear: bool = False,
    ) -> None:
        self.address = address
        self._clear = clear
        self._key_directory, self._host = key_directory, host
        self._open: dict[str, Announced] = {}
        self._workers: dict[str, ImageWorker] = {}
        self._complained = 0.0
        self._known = KnownKeys(key_directory)
        self.pages = PagePort(pages, hosts, self._open.get, self._known)

    def start(self) -> None:
        """Bind both ports and begin to take chunks; raises LiveshiftError if one is taken."""
        own = keys.load_private(self._key_directory, self._host)
        self._context = context = zmq.Context(io_threads=threads(IO_THREADS))
        self._auth = ThreadAuthenticator(context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=self._known)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.linger = 0
        socket.rcvhwm = 2 * WINDOW
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + OVERHEAD)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        end_dead_peers(socket)
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for images on {self.address}: {error}") from error
        self.pages.start()
        self._answers = AnswerQueue()
        threading.Thread(target=self._run, args=(socket,), name="receive", daemon=True).start()

    def close(self) -> None:
        """Take nothing more, and release the ports."""
        self.pages.close()
        self._auth.stop()
        self._context.term()

    def expect(
        self,
        migration: str,
        source: str,
        inlet: Inlet,
        limit_bytes: int,
        pages: PageStreams | None = None,
        lanes: int = 0,
    ) -> None:
        """Accept an image for a migration that the orchestrator announced.

        Only ``source`` may send it, and at most ``limit_bytes`` over all streams of lane 0.
        ``pages`` takes the chunks of lanes 1 to ``lanes``, as often as they come; without it the
        receiver takes lane 0 only. An inlet may be complete already, because its agent was
        restarted. It takes no more, but the receiver acknowledges its last chunks again.
        """
        assert lanes <= LANES
        entry = Announced(migration, source, inlet, limit_bytes, pages, lanes, clear=self._clear)
        self._workers[migration] = ImageWorker(partial(self._serve, entry))
        self._open[migration] = entry

    def forget(self, migration: str) -> None:
        self._open.pop(migration, None)
        self._workers.pop(migration, None)

    def received(self, migration: str) -> int:
        """Bytes of a migration's image taken so far, on all lanes."""
        entry = self._open.get(migration)
        return entry.ordered + entry.paged if entry else 0

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        answers = self._answers
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(answers.fd, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if socket in ready:
                    self._hand_on(socket)
                answers.send(socket)
        except zmq.ContextTerminated:
            answers.close()
            socket.close()

    def _hand_on(self, socket: zmq.Socket[bytes]) -> None:
        """Give at most WINDOW chunks to the threads of their images; answer what no image takes."""
        for _ in range(WINDOW):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            try:
                worker, header = self._worker(frames)
            except LiveshiftError as error:
                self._reply(frames, self._refusal(frames, error))
            except Exception:  # one peer's bad chunk must not stop the other migrations
                log.exception("dropped a chunk")
            else:
                worker.put((header, frames))

    def _worker(self, frames: list[zmq.Frame]) -> tuple[ImageWorker, Header]:
        """Who takes a chunk; raises LiveshiftError for one that belongs to no image."""
        host = self._known.owner(frames[-1])
        if len(frames) != 3:
            raise LiveshiftError(f"a chunk came as {len(frames) - 1} frames, expected 2")
        if host == NOBODY:
            raise LiveshiftError("a chunk came from a key that this host no longer knows")
        header = read_header(frames[1].buffer)
        entry, worker = self._open.get(header.migration), self._workers.get(header.migration)
        if entry is None or worker is None or entry.source != host:
            raise LiveshiftError(
                f"{host} sent an image for {header.migration}, which was not announced"
            )
        return worker, header

    def _serve(self, entry: Announced, chunk: Chunk) -> None:
        """Take one chunk, and let its answer be sent."""
        header, frames = chunk
        try:
            answer = self._answer(entry, header, frames)
        except Exception:
            log.exception("dropped a chunk")
        else:
            self._reply(frames, answer)

    def _reply(self, frames: list[zmq.Frame], answer: Answer) -> None:
        self._answers.put(frames[0].bytes, msgspec.msgpack.encode(answer))

    def _answer(self, entry: Announced, header: Header, frames: list[zmq.Frame]) -> Answer:
        if entry.refused is not None:
            return "refused", entry.refused
        data = frames[2].buffer
        if header.stream not in (WANTS, SEAL):
            return entry.accept(header, data)
        try:
            return entry.reply(header, data, str(frames[-1].get("User-Id")))
        except LiveshiftError as error:
            return self._refusal(frames, error)

    def _refusal(self, frames: list[zmq.Frame], error: LiveshiftError) -> Answer:
        self._complain(f"dropped a chunk from {self._known.owner(frames[-1])}: {error}")
        return "refused", str(error)

    def _complain(self, text: str) -> None:
        """Log an error, at most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)
