# SPDX-License-Identifier: Apache-2.0
"""Lane 0 of a migration at its source: streams in the order in which they are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import xxhash
import zmq

from ...criu_glue.survey.epoll_sets import EpollEntry
from ...errors import LiveshiftError, StepFailed
from ..control import keys
from ..model import manifest
from ..model.manifest import Manifest
from .header import CHUNK, SEAL, WANTS
from .lane import TICK_MS, ImageDestination
from .ordered_lane import OrderedLane
from .wants import Wants, read_wants

WAIT_S = 0.002
"""A thread that waits while others send looks for answers this often."""


class Sender:
    """The source's end of one migration. Threads may send at once, each its own streams.

    ``patience``: as in ImageDestination. ``until`` (monotonic seconds) may be set: the destination
    must acknowledge everything by that time.
    """

    until = float("inf")

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
            # Copy: the chunk is kept until acknowledged, but the caller reuses a view's memory.
            self._send(stream, bytes(data[at : at + CHUNK]))

    def manifest_streams(self) -> dict[str, tuple[int, int]]:
        """Every stream so far except a manifest: name → (bytes, xxh3-64 of them)."""
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
        beside: Mapping[str, tuple[int, int]] | None = None,
        epoll: Sequence[EpollEntry] = (),
    ) -> Manifest:
        """End the streams that are still open, and send the manifest of all streams.

        ``beside``: the streams of other lanes (Lanes.end). ``epoll``: the parts of epoll sets that
        CRIU could not dump.

        Once :meth:`finish` has returned, the image is complete at the destination. The image may be
        complete even if this method or finish raises, because the answer may have been lost.
        """
        for stream in [s for s in self.streams if s not in self._ended]:
            self.send(stream, b"")
        found = Manifest(
            version=manifest.VERSION,
            migration=self.to.migration,
            capsule=capsule,
            image_bytes=image_bytes,
            streams={**self.manifest_streams(), **(beside or {})},
            pipes=dict(pipes),
            removed=manifest.as_bytes(removed),
            epoll=list(epoll),
        )
        self.send(manifest.STREAM, manifest.encode(found))
        self.send(manifest.STREAM, b"")
        return found

    def _send(self, stream: str, data: bytes) -> None:
        with self._turn:
            self._lane.send(stream, data)
            self._hashes.setdefault(stream, xxhash.xxh3_64()).update(data)
            self.bytes += len(data)
            self.streams[stream] = self.streams.get(stream, 0) + len(data)
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
            self._lane.ask(what, data)
            while self._lane.answer is None and not given_up():
                self._hear(block=True)
            self._lane.drop_question()
            return self._lane.answer

    def _hear(self, block: bool) -> None:
        if block:
            self._lane.socket.poll(TICK_MS)
        self._lane.read_answers()
        self._lane.check(self.until)
