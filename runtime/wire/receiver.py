# SPDX-License-Identifier: Apache-2.0
"""A host's end of the wire: takes the chunks of every migration that was announced to it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...cores import threads
from ...errors import LiveshiftError
from ..control import keys
from ..control.keyring import NOBODY, Known
from .announced import Announced, Answer, Inlet, Pages
from .header import CHUNK, LANES, OVERHEAD, SEAL, WANTS, Header, read_header
from .ordered_lane import WINDOW
from .page_port import PagePort

log = logging.getLogger("liveshift.wire")

IO_THREADS = 4
"""Threads of libzmq's at most, which decrypt; each connection has one of them."""


class Receiver:
    """Lane 0 of all migrations that arrive here, with a socket and a thread; beside it a port for
    their pages.

    ``address`` and ``pages``: where both listen, "ADDRESS:PORT"; ``hosts``: the addresses that
    pages may come from; ``clear``: they may come in clear (wire.seal).
    """

    def __init__(
        self, address: str, pages: str, key_directory: Path, host: str, hosts: Iterable[str],
        *, clear: bool = False,
    ) -> None:  # fmt: skip
        self.address = address
        self._clear = clear
        self._key_directory, self._host = key_directory, host
        self._open: dict[str, Announced] = {}
        self._complained = 0.0
        self._known = Known(key_directory)
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
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for images on {self.address}: {error}") from error
        self.pages.start()
        threading.Thread(target=self._run, args=(socket,), name="receive", daemon=True).start()

    def close(self) -> None:
        """Take nothing more, and let go of the ports."""
        self.pages.close()
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
        ``pages`` takes what comes on lanes 1 to ``lanes``, as often as it comes; without it no lane
        but 0 is taken.
        """
        assert lanes <= LANES
        self._open[migration] = Announced(
            migration, source, inlet, limit_bytes, pages, lanes, clear=self._clear
        )

    def forget(self, migration: str) -> None:
        self._open.pop(migration, None)

    def received(self, migration: str) -> int:
        """Bytes taken so far."""
        entry = self._open.get(migration)
        return entry.ordered + entry.paged if entry else 0

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
                raise LiveshiftError(f"a chunk came as {len(frames) - 1} frames, expected 2")
            if host == NOBODY:
                raise LiveshiftError("a chunk came from a key that is not known here any more")
            header, data = read_header(frames[1].buffer), frames[2].buffer
            entry = self._open.get(header.migration)
            if entry is None or entry.source != host:
                raise LiveshiftError(
                    f"{host} sent an image for {header.migration}, which is not expected"
                )
            return self._take(entry, header, data, frames[-1])
        except LiveshiftError as error:
            self._complain(f"dropped a chunk from {host}: {error}")
            return "refused", str(error)

    def _take(self, entry: Announced, header: Header, data: memoryview, frame: zmq.Frame) -> Answer:
        if entry.refused is not None:
            return "refused", entry.refused
        if header.stream in (WANTS, SEAL):
            return entry.reply(header, data, str(frame.get("User-Id")))
        return entry.take(header, data)

    def _complain(self, text: str) -> None:
        """At most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)
