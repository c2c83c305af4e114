# SPDX-License-Identifier: Apache-2.0
"""Reads pages of processes with several threads and hands them on in chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .... import background
from .ring import ChunkRing, ChunkSlot
from .source_engine import DONE, PAUSE, Chunk, Pull

BATCH = 4 << 20
"""A thread reads at most this many bytes between two calls of its throttle."""

Sink = Callable[[memoryview, Callable[[], None]], None]
"""A sink takes a chunk. The chunk's memory belongs to the sink until the sink calls the second
argument. All reading threads call the sink, several at the same time."""


Throttle = Callable[[int], None]
"""A throttle gets how many bytes a thread has just read, and returns when that thread may read
more. Several threads call it at the same time."""


def unthrottled(read: int) -> None:
    """A throttle that never waits."""


class PullStopped(Exception):
    """The caller does not want the work any more. The chunks handed on so far are valid."""


class Pulling:
    """A pool of threads that read. It does one job at a time, with all threads."""

    def __init__(self, threads: int, ring: ChunkRing) -> None:
        self._threads = threads
        self._ring = ring
        self._pool = ThreadPoolExecutor(threads, "pull")

    def close(self) -> None:
        self._pool.shutdown()

    def scan(self, scans: Sequence[Callable[[], None]]) -> None:
        """Run these functions, several at a time. When all have ended, raises what one of them has
        raised: a scan that goes on would protect pages whose writes the next one looks for."""
        if len(scans) == 1:
            scans[0]()
            return
        begun = [self._pool.submit(scan) for scan in scans]
        for error in [each.exception() for each in begun]:
            if error is not None:
                raise error

    def pull(
        self, pulls: Sequence[Pull], sink: Sink, throttle: Throttle, stopped: Callable[[], bool]
    ) -> int:
        """Read all pulls, one process after the other. Return the bytes of all chunks.

        Raises PullStopped, or what the sink or the throttle has raised; then a part of the pages is
        lost.
        """
        failed = threading.Event()

        def give_up() -> bool:
            return failed.is_set() or stopped()

        def work() -> int:
            try:
                return _Worker(self._ring, sink, throttle, give_up).run(pulls)
            except BaseException:
                failed.set()
                raise

        errors: list[BaseException] = []
        sent = 0
        for each in [self._pool.submit(work) for _ in range(self._threads)] if pulls else []:
            if error := each.exception():
                errors.append(error)
            else:
                sent += each.result()
        for error in sorted(errors, key=lambda error: isinstance(error, PullStopped)):
            raise error
        return sent


class _Worker:
    def __init__(
        self, ring: ChunkRing, sink: Sink, throttle: Throttle, stopped: Callable[[], bool]
    ) -> None:
        self._ring = ring
        self._sink = sink
        self._throttle = throttle
        self._stopped = stopped
        self._chunk = Chunk()
        self._slot: ChunkSlot | None = None
        self._sent = 0

    def run(self, pulls: Sequence[Pull]) -> int:
        try:
            for pull in pulls:
                self._read(pull)
        finally:
            if self._slot is not None:
                self._slot.release()
        return self._sent

    def _read(self, pull: Pull) -> None:
        how = PAUSE
        while how != DONE:
            if self._slot is None:
                self._slot = self._ring.next_slot(self._stopped)
                if self._slot is None:
                    raise PullStopped
            self._chunk.begin(self._slot.memory)
            background.adopt()
            while True:
                how, read = self._chunk.fill(pull, BATCH)
                self._throttle(read)
                if how != PAUSE or self._stopped():
                    break
            self._hand_on(pull)
            # If each batch fills a chunk, and the sink gives the slot back before it waits for the
            # link, no check above asks whether the round is still wanted.
            if how != DONE and self._stopped():
                raise PullStopped

    def _hand_on(self, pull: Pull) -> None:
        length = self._chunk.end(pull)
        if not length:
            return
        slot, self._slot = self._slot, None
        assert slot is not None
        self._sink(slot.memory[:length], slot.release)
        self._sent += length
