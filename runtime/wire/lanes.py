# SPDX-License-Identifier: Apache-2.0
"""Lanes 1 to n of a migration at its source: memory, over several connections at once.

The thread that brings a chunk also seals it (:meth:`Lanes.pages`); several threads may do so at
once. The thread seals the chunk from its slot into a buffer of the lanes. The buffer stays until
the destination has acknowledged the chunk. The slot is given back (``release``) as soon as the
chunk is sealed. One thread owns all connections: it sends the sealed chunks and reads the
acknowledgements. libzmq's own threads write to the network.

Each Lanes object makes a key of its own. It sends the key to the destination over lane 0 before it
connects.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from operator import ge

import zmq

from ... import background
from ...cores import threads
from ...errors import StepFailed
from ..config.choices import Compress
from .compression import Compressor
from .header import CHUNK, DEVICE, LANES, MEMORY, RATE, Kind
from .lane import TICK_MS
from .meter import Meter, burst_sizes
from .page_lane import LANE_WINDOW, PageLane
from .seal import make_key
from .sender import Sender

GREETING = b"?"
"""The first chunk of each lane. It is of the kind RATE, so the destination does not store it."""

SLOW_LINK = 125e6
"""Bytes per second: 1 Gbit/s. A quicker link carries a chunk in less time than it takes to compress
the chunk."""

_Data = bytes | memoryview


class Lanes:
    """One migration's lanes for memory at the source.

    ``beside``: lane 0 of the migration. ``endpoint``: where the destination takes pages.
    ``streams``: the number of connections, 1 to LANES. ``clear``: the network is trusted, so pages
    are not sealed.

    Threads may call :meth:`pages` and :meth:`device` at the same time. Every method raises
    StepFailed once the destination has refused something, was silent for too long
    (ImageDestination.patience), or has not acknowledged everything by ``until`` (monotonic
    seconds). ``until`` may be set at any time. ``also`` may be set: it gets each chunk of pages
    too, before it is sealed, and must not raise; several threads call it.
    """

    until = float("inf")
    also: Callable[[memoryview], None] | None = None

    def __init__(
        self,
        beside: Sender,
        endpoint: str,
        streams: int,
        compress: Compress = Compress.AUTO,
        *,
        clear: bool = False,
    ) -> None:
        assert 1 <= streams <= LANES
        self._beside, self._endpoint, self._to = beside, endpoint, beside.to
        self._context = zmq.Context(io_threads=threads(streams))
        self._key = make_key(clear=clear)
        free: list[memoryview] = []
        self._lanes = [
            PageLane(self._context, beside.to, k, self._key, Compressor(compress), free)
            for k in range(1, streams + 1)
        ]
        self._credit = [LANE_WINDOW] * streams  # chunks that may be sealed for each lane
        self._settled = [0] * streams  # acknowledged chunks of each lane
        self._meter = Meter()
        self._slow = False  # whether the link was measured to be slow
        self._greeted = 0  # lanes whose first chunk was acknowledged
        self._changed = threading.Condition()
        self._failed: StepFailed | None = None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
        self._thread.start()

    @property
    def rate(self) -> float:
        """Bytes per second that the lanes were last seen to carry; 0.0 where that is not known."""
        return self._meter.rate

    @property
    def bytes(self) -> int:
        """Bytes of host memory that were sent."""
        return sum(lane.bytes for lane in self._lanes)

    @property
    def device_bytes(self) -> list[int]:
        """Bytes of device memory that were sent, by lane."""
        return [lane.device_bytes for lane in self._lanes]

    def pages(self, chunk: memoryview, release: Callable[[], None]) -> None:
        """Seal a chunk of at most CHUNK bytes for the lane with the most credit. The lanes' own
        thread sends it. Blocks while all windows are full.

        ``chunk`` must not change until ``release`` is called. That happens exactly once, before
        this method returns or raises. ``release`` must not raise or wait.
        """
        assert 0 < len(chunk) <= CHUNK
        try:
            if self.also is not None:
                self.also(chunk)
            self._put(MEMORY, chunk)
        finally:
            release()

    def device(self, process: int, at: int, chunk: memoryview) -> None:
        """Seal a chunk of at most CHUNK bytes of a process's device memory, whose first byte is at
        ``at``; as :meth:`pages`. ``chunk`` is not read after the return."""
        assert 0 < len(chunk) <= CHUNK
        self._put(DEVICE, chunk, process=process, at=at)

    def mark(self) -> list[int]:
        """What :meth:`finish` takes: the number of chunks that each lane has sealed by now."""
        return [lane.numbered for lane in self._lanes]

    def finish(self, mark: Sequence[int] | None = None) -> None:
        """Return when the destination has acknowledged every chunk that was sealed before ``mark``,
        or before this call. This is a barrier, and does not wait for what other threads send later.
        """
        until = self.mark() if mark is None else mark
        with self._changed:
            self._changed.wait_for(lambda: self._closing or all(map(ge, self._settled, until)))
            self._raise()

    def end(self) -> dict[str, tuple[int, int]]:
        """End every lane's stream; return the streams' entries in the manifest: name → (bytes,
        xxh3-64 of the tags of its chunks' seals)."""
        self.finish()
        used = [n for n, lane in enumerate(self._lanes) if lane.bytes or lane.device_bytes]
        for n in used:
            self._put(MEMORY, b"", [n])
        self.finish()
        lanes = ((n, self._lanes[n]) for n in used)
        return {
            f"{MEMORY}:{n + 1}": (lane.bytes + lane.device_bytes, lane.hash.intdigest())
            for n, lane in lanes
        }

    def measure(self) -> float:
        """Send a burst of meaningless bytes and return the bytes per second that the lanes carry
        now. The burst takes 50 ms, or longer on a link slower than some MB/s."""
        block = memoryview(os.urandom(CHUNK))
        with self._changed:
            self._changed.wait_for(lambda: self._greeted == len(self._lanes) or self._closing)
            self._raise()
        sizes = burst_sizes(len(self._lanes))
        chunks = next(sizes)
        while True:
            begin = time.monotonic()
            for size in chunks:
                self._put(RATE, block[:size])
            self.finish()
            took = time.monotonic() - begin
            self._meter.saw(sum(chunks), took)
            try:
                chunks = sizes.send(took)
            except StopIteration:
                self._slow = self.rate < SLOW_LINK
                return self.rate

    def close(self) -> None:
        """Give up the chunks that are not acknowledged. May be called again."""
        with self._changed:
            self._closing = True
            self._wake_up()
        self._thread.join()
        with self._changed:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _put(
        self, kind: Kind, data: _Data, lanes: Sequence[int] = (), process: int = 0, at: int = 0
    ) -> None:
        """Seal a chunk for one of ``lanes`` (numbered from 0), or of all connected lanes."""

        def best() -> int:
            return max(lanes or range(self._greeted), key=self._credit.__getitem__, default=-1)

        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (best() >= 0 and self._credit[best()] > 0)
            )
            self._raise()
            n = best()
            self._credit[n] -= 1
        try:
            rate = self._meter.rate if self._link_is_slow() else 0.0
            self._lanes[n].seal(kind, data, rate, process, at)
        except Exception as error:  # the chunk is lost, and with it the migration
            raise self._broke(error) from error
        self._wake_up()

    def _broke(self, error: Exception) -> StepFailed:
        """Let every waiting or later call raise StepFailed; return that error."""
        with self._changed:
            if self._failed is None and isinstance(error, StepFailed):
                self._failed = error
            elif self._failed is None:
                text = f"the lanes to {self._to.name} broke: {error!r}"
                self._failed = StepFailed("ship", text)
            self._closing = True
            self._changed.notify_all()
            self._wake_up()
            return self._failed

    def _wake_up(self) -> None:
        with self._changed:
            if self._wake >= 0:
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
        try:
            self._announce()
            self._connect()
            while not self._closing:
                ready = dict(poller.poll(TICK_MS))
                if ready.pop(self._wake, 0):
                    os.eventfd_read(self._wake)
                self._turn()
        except Exception as error:
            self._broke(error)
        self._end()

    def _turn(self) -> None:
        """Take the answers that have come, and send the sealed chunks."""
        background.adopt()
        settled = [lane.read_answers() for lane in self._lanes]
        if any([lane.check(self.until) for lane in self._lanes]):
            self._announce()  # a restarted agent has lost the key: only lane 0 shows that
        self._connect()
        for lane in self._lanes:
            lane.send_sealed()
        acknowledged = sum(lane.acknowledged for lane in self._lanes)
        self._meter.note(acknowledged, self._under_way() > len(self._lanes))
        if any(settled):
            with self._changed:
                for n, chunks in enumerate(settled):
                    self._credit[n] += chunks
                    self._settled[n] += chunks
                self._changed.notify_all()

    def _announce(self) -> None:
        self._beside.seal(self._key, lambda: self._closing)

    def _connect(self) -> None:
        """Connect one lane after the other. The destination's libzmq gives a new connection to the
        thread that has the fewest. Of several at once it would give all to the same thread."""
        while self._greeted < len(self._lanes):
            lane = self._lanes[self._greeted]
            if not lane.connected:
                lane.connect(self._endpoint)
                with self._changed:
                    self._credit[self._greeted] -= 1
                lane.seal(RATE, GREETING)
            if not lane.acknowledged:
                return
            with self._changed:
                self._greeted += 1
                self._changed.notify_all()

    def _link_is_slow(self) -> bool:
        """Whether the link is what limits the chunks. Otherwise the tracker limits them, and
        compression would only take CPU time from the job. While the job is frozen, each chunk has
        to wait for a slow link. Only :meth:`measure` knows one: what chunks take otherwise depends
        on the processors as well."""
        frozen = self.until != float("inf")
        return self._under_way() > len(self._lanes) or (frozen and self._slow)

    def _under_way(self) -> int:
        """The number of chunks that are sealed, or being sealed, and not acknowledged."""
        return len(self._lanes) * LANE_WINDOW - sum(self._credit)

    def _end(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._context.term()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
