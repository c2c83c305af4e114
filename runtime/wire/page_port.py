# SPDX-License-Identifier: Apache-2.0
"""The port that pages come to: libzmq carries them (mechanism NULL), what they are is sealed.

Anybody who can send from the address of a host of the cluster may knock here. So nothing is done
with what does not open under the key that the announced source has sent over lane 0 (seal.py), and
nothing is answered to it. What opens has been sealed by that source, for this migration, lane and
number; a number that was taken before is not taken again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ...cores import threads
from ...errors import LiveshiftError
from ..keyring import Known
from .announced import Announced
from .header import CHUNK, read_page_header
from .page_lane import LANE_WINDOW
from .seal import TAG

log = logging.getLogger("liveshift.wire")

IO_THREADS = 4
"""Threads of libzmq's at most, which read; each connection has one of them."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc: malloc.h


class PagePort:
    """One socket and one thread for the pages of all migrations.

    ``hosts``: the addresses that are let in; ``find``: the migration of that name, if it was
    announced; ``known``: whose key is it now?
    """

    def __init__(
        self, address: str, hosts: Iterable[str], find: Callable[[str], Announced | None],
        known: Known,
    ) -> None:  # fmt: skip
        self.address = address
        self._hosts, self._find, self._known = hosts, find, known
        self._plain = memoryview(bytearray(CHUNK))
        self._complained = 0.0

    def start(self) -> None:
        """Raises LiveshiftError if the port is taken."""
        _keep_freed_memory()
        self._context = context = zmq.Context(io_threads=threads(IO_THREADS))
        self._auth = ThreadAuthenticator(context)
        self._auth.start()
        self._auth.allow(*self._hosts)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        socket.zap_domain = b"pages"  # without one libzmq asks nobody about NULL
        socket.linger = 0
        socket.rcvhwm = 2 * LANE_WINDOW
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + TAG)
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise LiveshiftError(f"cannot listen for pages on {self.address}: {error}") from error
        threading.Thread(target=self._run, args=(socket,), name="pages", daemon=True).start()

    def close(self) -> None:
        """Take nothing more, and let go of the port."""
        self._auth.stop()
        self._context.term()

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                socket.close()
                return
            try:
                answer = self._answer(frames)
            except LiveshiftError as error:
                self._complain(f"dropped what came to the port for pages: {error}")
                continue
            except Exception:  # whatever a peer sends, the other migrations go on
                log.exception("dropped a chunk")
                continue
            with contextlib.suppress(zmq.ZMQError):  # the sender is gone
                socket.send_multipart([frames[0].bytes, answer])

    def _answer(self, frames: list[zmq.Frame]) -> bytes:
        """Raises LiveshiftError for what is not to be answered."""
        if len(frames) != 3:
            raise LiveshiftError(f"a chunk came as {len(frames) - 1} frames, expected 2")
        beside, sealed = frames[1].buffer, frames[2].buffer
        header = read_page_header(beside)
        entry = self._find(header.migration)
        seal = entry.seal if entry is not None else None
        if entry is None or seal is None:
            raise LiveshiftError(f"pages came for {header.migration!a}, which is not expected")
        data = seal.open(header, beside, sealed, self._plain)
        if self._known.name_of(seal.speaker) != entry.source:
            raise LiveshiftError(
                f"pages came from {entry.source}, whose key does not count any more"
            )
        kind, value = entry.take_page(seal, header, data, bytes(sealed[-TAG:]))
        return seal.answer(header.lane, kind, value)

    def _complain(self, text: str) -> None:
        """At most once a second: a peer must not be able to fill the log."""
        now = time.monotonic()
        if now - self._complained > 1.0:
            self._complained = now
            log.error("%s", text)


def _keep_freed_memory() -> None:
    """Chunks are memory of libzmq's, 1 MiB each. By default glibc gives that back to the kernel
    again and again, and gets it anew page by page: a third of the CPU time of receiving."""
    with contextlib.suppress(AttributeError, OSError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TOP_PAD, 16 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)
