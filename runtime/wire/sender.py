# SPDX-License-Identifier: Apache-2.0
"""Lane 0 of a migration at its source: streams in the order in which they are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ...errors import LiveshiftError, StepFailed
from ..control import keys
from .header import SEAL, WANTS
from .lane import TICK_MS, ImageDestination
from .ordered_lane import OrderedLane
from .silence import Silence
from .stream_sender import StreamSender
from .wants import Wants, read_wants

Also = Callable[[str, bytes], None]

WAIT_S = 0.002
"""A thread that waits while others send looks for answers this often."""


class Sender(StreamSender):
    """The source's end of one migration. Threads may send at once, each its own streams. All
    methods raise StepFailed when the destination refuses, or stays silent for too long.

    ``patience``: as in ImageDestination. ``until`` (monotonic seconds) may be set: the destination
    must acknowledge everything by that time. ``also`` may be set: it gets each chunk too, in the
    same order, and must not raise.
    """

    until = float("inf")
    also: Also | None = None

    def __init__(
        self,
        migration: str,
        endpoint: str,
        key_directory: Path,
        host: str,
        destination: str,
        patience: float,
    ) -> None:
        """Load the keys with which ``host`` reaches ``destination``, and connect; raises like the
        functions of keys.py."""
        own = keys.load_private(key_directory, host)
        public = keys.public_keys(key_directory)[destination]
        to = ImageDestination(migration, endpoint, destination, own, public, patience)
        self._context = zmq.Context()
        self._lane = OrderedLane(self._context, to)
        self._lane.connect(to.endpoint)
        self.to = to
        self._turn = threading.Lock()
        super().__init__()

    @property
    def migration(self) -> str:
        return self.to.migration

    @property
    def silence(self) -> Silence:
        """That of the destination, on all lanes of the image."""
        return self.to.silence

    def _send(self, stream: str, data: bytes) -> None:
        with self._turn:
            self._lane.send(stream, data)
            self._count(stream, data)
            if self.also is not None:
                self.also(stream, data)
            self._hear(block=False)
            while not self._lane.credit:
                self._hear(block=True)

    def finish(self) -> None:
        """Return when the destination has acknowledged every chunk; raises like :meth:`send`."""
        with self._turn:
            while self._lane.pending:
                self._hear(block=True)

    def wait_taken(self) -> None:
        """Return when the destination has acknowledged every chunk that was sent before this call;
        other threads may send meanwhile. Raises like :meth:`send`."""
        with self._turn:
            last = self._lane.pending[-1].number if self._lane.pending else -1
        while True:
            with self._turn:
                self._hear(block=False)
                if not self._lane.pending or self._lane.pending[0].number > last:
                    return
            time.sleep(WAIT_S)  # without the lock, so that others can send

    def wants(self) -> Wants:
        """Ask which of the pages that were only named must be sent, as (inner pid, address, pages).
        The answer may not hold all of them, so the caller asks again. Raises like :meth:`send`.

        The destination must have acknowledged all pages on the other lanes (Lanes.finish).
        """
        answer = self._ask(WANTS)
        try:
            return read_wants(answer if isinstance(answer, bytes) else b"")
        except LiveshiftError as error:
            raise StepFailed("ship", f"{self.to.name} sent an invalid answer: {error}") from error

    def seal(self, key: bytes, given_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the destination uses this key for pages, and no earlier one, or once
        ``given_up`` returns true. May be repeated with the same key. Raises like :meth:`send`."""
        self._ask(SEAL, key, given_up)

    def close(self) -> None:
        self._lane.close()
        self._context.term()

    def _ask(
        self, what: str, data: bytes = b"", given_up: Callable[[], bool] = lambda: False
    ) -> int | bytes | None:
        with self._turn:
            self._lane.send_question(what, data)
            while self._lane.answer is None and not given_up():
                self._hear(block=True)
            self._lane.drop_question()
            return self._lane.answer

    def _hear(self, block: bool) -> None:
        if block:
            self._lane.socket.poll(TICK_MS)
        self._lane.read_answers()
        self._lane.check(self.until)
