# SPDX-License-Identifier: Apache-2.0
"""Lanes 1 to n of a migration at its source: pages of memory, over several connections at once.

A chunk is sealed (seal.py) from the slot that it lies in into a buffer of ours, where it stays
until the destination has acknowledged it. The slot is given back (``release``) as soon as it was
sealed, or once the lanes have ended; exactly once in either case.

One thread owns all lanes. ``pages`` only puts a chunk into its queue; that thread seals, libzmq's
own write to the network. Each Lanes object makes a key of its own, and tells the destination over
lane 0 before it connects.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import xxhash
import zmq

from ...cores import threads
from ...errors import StepFailed
from ..config_memory import Compress
from .compression import Compressor
from .header import CHUNK, LANES, MEMORY, RATE, Kind
from .lane import TICK_MS
from .meter import Meter, burst_sizes
from .page_lane import LANE_WINDOW, Buffers, PageLane
from .seal import Opener, Sealer, make_key
from .sender import Sender

GREETING = b"?"
"""A lane's first chunk; nothing but bytes to measure with."""


class _Waiting(NamedTuple):
    kind: Kind
    data: bytes | memoryview
    release: Callable[[], None] | None = None
    lane: int | None = None  # from 0 on; None: any


class Lanes:
    """One migration's pages on their way. ``beside``: its lane 0; ``endpoint``: where the
    destination takes pages; ``streams``: how many connections, 1 to LANES.

    Threads may call :meth:`pages` at the same time. Every method raises StepFailed once the
    destination has refused something, was silent for too long (Destination.patience) or has not
    acknowledged what was sent by ``until`` (monotonic seconds), which may be set at any time.
    """

    until = float("inf")

    def __init__(
        self, beside: Sender, endpoint: str, streams: int, compress: Compress = Compress.AUTO
    ) -> None:
        assert 1 <= streams <= LANES
        self._beside, self._endpoint, self._to = beside, endpoint, beside.to
        self._context = zmq.Context(io_threads=threads(streams))
        self._key = make_key()
        ends = Sealer(self._key, "pages"), Opener(self._key, "answers"), Buffers()
        self._lanes = [PageLane(self._context, beside.to, k, *ends) for k in range(1, streams + 1)]
        self._sent = [0] * streams  # bytes of memory, by lane
        self._hashes = [xxhash.xxh3_64() for _ in self._lanes]
        self._compressor = Compressor(compress)
        self._meter = Meter()
        self._measured = 0  # bytes that were sent only for that
        self._greeted = 0  # lanes whose first chunk was acknowledged
        self._queue: deque[_Waiting] = deque()
        self._open = 0  # chunks that are queued or not acknowledged
        self._changed = threading.Condition()
        self._failed: StepFailed | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
        self._thread.start()

    @property
    def rate(self) -> float:
        """Bytes a second that the lanes were last seen to carry; 0.0 where it is not known."""
        return self._meter.rate

    @property
    def bytes(self) -> int:
        """Of memory that were sent."""
        return sum(self._sent)

    @property
    def wire_bytes(self) -> int:
        """That went over the lanes, acknowledged: less than :attr:`bytes` where compressed."""
        return self._acknowledged() - self._measured

    def pages(self, chunk: memoryview, release: Callable[[], None]) -> None:
        """Send a chunk of at most CHUNK bytes on the lane with the most credit.

        Its memory stays as it is until ``release`` is called, from another thread and as a rule
        before the chunk has arrived; it must not raise or wait. Where this raises, it is not
        called. Blocks while all windows are full.
        """
        assert 0 < len(chunk) <= CHUNK
        self._put(_Waiting(MEMORY, chunk, release))

    def finish(self) -> None:
        """Return when the destination has acknowledged every chunk: a barrier."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._closing)
            self._raise()

    def end(self) -> dict[str, tuple[int, int]]:
        """End every lane's stream; returns what stands of them in the manifest: name → (bytes,
        xxh3-64 of the tags of its chunks' seals)."""
        self.finish()
        used = [n for n, sent in enumerate(self._sent) if sent]
        for n in used:
            self._put(_Waiting(MEMORY, b"", lane=n))
        self.finish()
        return {f"{MEMORY}:{n + 1}": (self._sent[n], self._hashes[n].intdigest()) for n in used}

    def measure(self) -> float:
        """Bytes a second that the way to the destination carries now, by a burst of bytes that mean
        nothing: 50 ms, longer only where the way is slower than some MB/s."""
        block = memoryview(os.urandom(CHUNK))
        with self._changed:
            self._changed.wait_for(lambda: self._greeted == len(self._lanes) or self._closing)
            self._raise()
        sizes = burst_sizes(len(self._lanes))
        chunks = next(sizes)
        while True:
            begin = time.monotonic()
            for size in chunks:
                self._put(_Waiting(RATE, block[:size]))
            self.finish()
            took = time.monotonic() - begin
            self._meter.saw(sum(chunks), took)
            self._measured += sum(chunks)
            try:
                chunks = sizes.send(took)
            except StopIteration:
                return self.rate

    def close(self) -> None:
        """Give up what is not acknowledged and release all slots. May be called again."""
        with self._changed:
            self._closing = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._changed:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _acknowledged(self) -> int:
        return sum(lane.acknowledged for lane in self._lanes)

    def _put(self, chunk: _Waiting) -> None:
        most = len(self._lanes) * LANE_WINDOW
        with self._changed:
            self._changed.wait_for(lambda: self._open < most or self._closing)
            self._raise()
            self._open += 1
            self._queue.append(chunk)
            os.eventfd_write(self._wake, 1)

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closing:
            raise StepFailed("ship", f"the lanes to {self._to.name} are closed")

    # ---- the lanes' own thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for lane in self._lanes:
            poller.register(lane.socket, zmq.POLLIN)
        failed: StepFailed | None = None
        try:
            self._announce()
            self._connect()
            while not self._closing:
                ready = dict(poller.poll(TICK_MS))
                if ready.pop(self._wake, 0):
                    os.eventfd_read(self._wake)
                self._turn()
        except StepFailed as error:
            failed = error
        except Exception as error:  # whatever it is, nobody may wait for ever
            failed = StepFailed("ship", f"the lanes to {self._to.name} broke: {error!r}")
        self._end(failed)

    def _turn(self) -> None:
        """Take the answers that have come, send what there is credit for."""
        for lane in self._lanes:
            lane.hear()
        if any([lane.check(self.until) for lane in self._lanes]):
            self._announce()  # an agent that has been started anew says so there, and not here
        self._connect()
        while self._queue and (lane := max(self._lanes, key=_credit)).credit > 0:
            self._send(lane, self._queue.popleft())
        pending = self._pending()
        self._meter.note(self._acknowledged(), pending > len(self._lanes))
        with self._changed:
            self._open = pending + len(self._queue)
            self._changed.notify_all()

    def _announce(self) -> None:
        self._beside.seal(self._key, lambda: self._closing)

    def _connect(self) -> None:
        """One lane after the other. Where several connections come at once, the destination's
        libzmq gives all of them to the same thread: it goes by those that each has already."""
        while self._greeted < len(self._lanes):
            lane = self._lanes[self._greeted]
            if not lane.connected:
                lane.connect(self._endpoint)
                lane.send(RATE, GREETING)
                self._measured += len(GREETING)
            if not lane.acknowledged:
                return
            self._greeted += 1

    def _send(self, lane: PageLane, chunk: _Waiting) -> None:
        if chunk.lane is not None:
            lane = self._lanes[chunk.lane]
        n = lane.index - 1
        data, raw = chunk.data, 0
        try:
            if chunk.kind == MEMORY and data:
                rate = self._meter.rate if self._link_is_slow() else 0.0
                data, raw = self._compressor.squeeze(data, rate)
            tag = lane.send(chunk.kind, data, raw)
        finally:
            if chunk.release is not None:
                chunk.release()
        if chunk.kind == MEMORY:
            self._sent[n] += len(chunk.data)
            self._hashes[n].update(tag)

    def _link_is_slow(self) -> bool:
        """Whether it is the link that chunks wait for. Else they are paced, and to compress them
        would only take more of the job's CPU time."""
        return self.until != float("inf") or self._pending() > len(self._lanes)

    def _pending(self) -> int:
        return sum(len(lane.pending) for lane in self._lanes)

    def _end(self, failed: StepFailed | None) -> None:
        """Slots of what was not sealed are given back."""
        for lane in self._lanes:
            lane.close()
        self._context.term()
        with self._changed:
            self._failed = failed
            self._closing = True
            left = [chunk.release for chunk in self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for release in left:
            if release is not None:
                release()


def _credit(lane: PageLane) -> int:
    return lane.credit
