# SPDX-License-Identifier: Apache-2.0
"""The memory of a capsule that leaves: the lanes on which its pages go, and who sends them.

While the job trains, PrecopyRounds sends them. When the tree is frozen, FinalDirtySet sends the
rest. If the tracker cannot follow the memory, there are neither lanes nor rounds: CRIU's image
contains all of it (a full dump). A snapshot borrows its tracker (capsule_tracker.py), and always
makes single rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .... import units
from ....criu_glue.criu.page_filter import PageFilter
from ....criu_glue.memory.source.tracker import MemoryTracker
from ...config.choices import Way
from ...messages import Chosen, Progressed, StartPrecopy
from ...model import link_rates
from ...model.stopwatch import Lap, Stopwatch
from ...wire import Lanes, Sender
from ..host.running_capsule import CapsuleFactory, RunningCapsule
from .final_dirty_set import FinalDirtySet
from .forecast import full_dump_because
from .precopy import PrecopyRounds, choose_way, describe_rounds
from .progress import RoundsReporter

NEVER = float("inf")


@dataclass(frozen=True)
class OutgoingWire:
    """What leads from this host to the destination, and to the orchestrator. ``report`` sends a
    progress report, or loses it; any thread may call it. ``give_up_copy``: nothing more goes into
    this host's own copy, for the reason given."""

    sender: Sender
    open_lanes: Callable[[Sender], Lanes]
    report: Callable[[Progressed], None]
    give_up_copy: Callable[[str], None] = lambda _why: None


class OutgoingMemory:
    """The memory of one outgoing capsule. Any thread may call ``cancel``, ``give_up``, ``pause``,
    ``resume`` and ``end_sooner``, at any time; all other methods block."""

    def __init__(
        self,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        wire: OutgoingWire | None,
        lent: MemoryTracker | None = None,
    ) -> None:
        """``wire``: None if nothing will be sent any more. ``lent``: the tracker that a snapshot
        has borrowed; it is not closed here."""
        self._resident = resident
        self._factory = factory
        self._wire = wire
        self._lent = lent
        self._lanes: Lanes | None = None
        self._rounds: PrecopyRounds | None = None
        self._page_filter: PageFilter | None = None
        self._full_dump = ""  # why CRIU's image carries all memory; "" if it does not
        self._cancelled = self._given_up = self._paused = False
        self._sooner = NEVER  # monotonic seconds; rounds end by then
        self._asked = threading.Lock()  # for what was asked of the rounds, and what they know of it

    @property
    def sent(self) -> int:
        """Bytes of memory that went over the lanes, device memory too."""
        return self._lanes.bytes + sum(self._lanes.device_bytes) if self._lanes is not None else 0

    @property
    def chosen(self) -> Chosen | None:
        """The way that was chosen, if there was a choice."""
        return self._rounds.chosen if self._rounds is not None else None

    @property
    def on_idle_cores(self) -> bool:
        """Whether the idle cores suffice for the chosen rounds, and no deadline presses."""
        return self._rounds is not None and self._rounds.on_idle_cores

    def begin(self, request: StartPrecopy, watch: Stopwatch) -> None:
        """Measure the link and choose the way of the memory, for the request of a migration with
        which ``watch`` began."""
        assert self._wire is not None
        if request.sooner:
            self.end_sooner(watch.began + request.sooner - time.monotonic())
        self._full_dump = request.full_dump or full_dump_because(
            self._factory.host, self._resident, self._factory.cluster.precopy
        )
        if self._full_dump:
            return
        with watch.phase("choose") as lap:
            rate = self._choose(request, self._wire, watch.began)
            lap.detail = f"the link takes {units.size(rate)}/s"

    def _choose(self, request: StartPrecopy, wire: OutgoingWire, asked: float) -> float:
        """Open the lanes and choose the way; return the rate of the link in bytes per second."""
        lanes = self._open_lanes(wire)
        rate = lanes.measure()
        link_rates.keep(self._factory.cluster.paths.run, request.destination, rate)
        carries = min(rate, link_rates.PAUSE_RATE)
        reporter = RoundsReporter(wire.report, request.migration, carries=carries)
        settings, wants = self._factory.cluster.precopy, wire.sender.wants
        rounds = PrecopyRounds(self._resident, lanes, settings, reporter, wants, rate)
        self._take_rounds(rounds)
        choose_way(rounds, request, self._resident, asked)
        return rate

    def begin_snapshot(self, snapshot: str) -> None:
        """Open the lanes for ``snapshot``. Each :meth:`send_ahead` makes one round with the tracker
        that was lent. There is no way to choose, so the link is not measured."""
        assert self._wire is not None
        assert self._lent is not None
        lanes = self._open_lanes(self._wire)
        reporter = RoundsReporter(self._wire.report, snapshot)
        settings, wants = self._factory.cluster.precopy, self._wire.sender.wants
        self._take_rounds(
            PrecopyRounds(
                self._resident, lanes, settings, reporter, wants, 0.0, self._lent, Way.ROUND
            )
        )

    @property
    def lanes(self) -> Lanes | None:
        """The lanes, over which device memory may go too; None for a full dump."""
        return self._lanes

    def _open_lanes(self, wire: OutgoingWire) -> Lanes:
        self._lanes = lanes = wire.open_lanes(wire.sender)
        if self._given_up:
            lanes.until = 0.0
        return lanes

    def _take_rounds(self, rounds: PrecopyRounds) -> None:
        """Pass on to the rounds what other threads have asked of them by now."""
        with self._asked:
            self._rounds = rounds
            if self._sooner != NEVER:
                rounds.end_sooner(self._sooner - time.monotonic())
            if self._paused:
                rounds.pause()
            if self._cancelled:
                rounds.cancel()

    def send_ahead(self, until: float, lap: Lap) -> None:
        """Send memory while the job trains, until ``until`` (monotonic seconds) at the latest; then
        go on in a thread until :meth:`stop_rounds`."""
        lap.detail = f"full dump: {self._full_dump}"
        if self._rounds is not None:
            done = self._rounds.run(until)
            lap.bytes = done.sent
            lap.detail = describe_rounds(done)
            self._rounds.iterate_until_freeze()

    def end_sooner(self, seconds: float) -> None:
        """See :meth:`PrecopyRounds.end_sooner`."""
        with self._asked:
            self._sooner = min(self._sooner, time.monotonic() + seconds)
            if self._rounds is not None:
                self._rounds.end_sooner(seconds)

    def pause(self) -> None:
        """A capsule of the job will soon be frozen, perhaps this one."""
        with self._asked:
            self._paused = True
            if self._rounds is not None:
                self._rounds.pause()

    def resume(self) -> None:
        """The job's ranks train on."""
        with self._asked:
            self._paused = False
            if self._rounds is not None:
                self._rounds.resume()

    def cancel(self) -> None:
        """Begin no further round, and interrupt one that is under way."""
        with self._asked:
            self._cancelled = True
            if self._rounds is not None:
                self._rounds.cancel()

    def give_up(self) -> None:
        """Wait for no acknowledgement any more: calls that send pages now fail."""
        self._given_up = True
        if self._lanes is not None:
            self._lanes.until = 0.0

    def stop_rounds(self, watch: Stopwatch) -> None:
        """Stop the rounds; return when all that they sent has arrived. Raises the error that ended
        them."""
        if self._rounds is not None:
            with watch.phase("last round", frozen=True) as lap:
                interrupted = self._rounds.stop()
                lap.detail = "interrupted" if interrupted else "none was under way"

    def page_filter(self, images: Path) -> PageFilter | None:
        """What keeps CRIU from dumping memory that goes over the lanes; None if CRIU dumps all.
        ``images``: where it meets CRIU. It is the same at each call."""
        if self._rounds is not None and self._page_filter is None:
            self._page_filter = PageFilter(images)
        return self._page_filter

    def send_final_set(self, images: Path, until: float) -> FinalDirtySet | None:
        """Begin to send the rest of the memory, because CRIU is about to freeze the tree. Returns
        None if CRIU dumps all memory. ``images``: as in :meth:`page_filter`."""
        page_filter = self.page_filter(images)
        if page_filter is None or self._rounds is None or self._lanes is None or self._wire is None:
            return None
        self._lanes.until = until
        return FinalDirtySet(self._rounds, self._wire.sender, page_filter, until)

    def wait_without_end(self) -> None:
        """From the promise on, the orchestrator decides how long to wait for the destination."""
        if self._lanes is not None:
            self._lanes.until = NEVER

    def end_streams(self) -> dict[str, tuple[int, int]]:
        """End the lanes' streams; return their entries in the manifest."""
        return self._lanes.end() if self._lanes is not None else {}

    def digest(self) -> bytes:
        """Return the digest (digest.h) of the memory in the image. FinalDirtySet must have
        finished. Raises StepFailed if a page was not sent."""
        assert self._rounds is not None
        return self._rounds.tracker.digest()

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        elif self._lanes is not None:
            self._lanes.close()
