# SPDX-License-Identifier: Apache-2.0
"""A capsule's memory on its way to the destination, most of it while the job trains.

Order: ``rounds`` until what the job rewrites meanwhile no longer gets less; ``keep_fresh`` goes on
with them until the freeze is asked for; ``standstill`` sends, once CRIU holds the tree, what is
left and the table of all pages there are, and tells CRIU which of them are none of its business.

What a round did not bring over is the next one's; what none did is the standstill's. So any of them
may be interrupted, and without all of them the standstill sends everything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..criu_glue import gpu_tasks
from ..criu_glue.footprint import footprint
from ..criu_glue.memory.pulling import Stopped
from ..criu_glue.memory.tracker import MemoryTracker, Round, Standstill
from ..criu_glue.page_filter import PageFilter
from ..criu_glue.survey import tasks
from ..errors import LiveshiftError
from .config import Precopy as Settings
from .pace import Pace
from .progress import Reporter
from .resident import Resident
from .wire import PAGE_TABLE, Lanes, Sender, Wants

ENOUGH_S = 0.02
"""A round that would take no longer than this at standstill is as good as none."""

SOME = 1 << 20
"""Bytes from which on a round tells a rate."""

SHRINKS = 0.9
STALE = 2
"""Rounds in a row that found more than SHRINKS of what the one before had found: it is the job's
working set by now."""

NAP_S = 0.05

SHARED_MOST = 256 << 20
"""Bytes that a tree may share copy on write and yet be moved such that it does so no longer."""


@dataclass(frozen=True)
class Rounds:
    """What came of the pre-copy: bytes sent, bytes that the last round found rewritten."""

    number: int
    sent: int
    dirty: int
    rate: float
    lost: float | None
    offered: int = 0
    """Bytes that the destination had, of which it wanted ``wanted`` after all."""
    wanted: int = 0


class Precopy:
    """That of one capsule; ``reporter`` is told how far it is."""

    def __init__(
        self, resident: Resident, lanes: Lanes, settings: Settings, reporter: Reporter,
        wants: Callable[[], Wants], offer: bytes = b"",
    ) -> None:  # fmt: skip
        """``offer``: what the destination says to have anyway; ``wants`` asks it what of that was
        not so. Raises StepFailed for an offer that is none."""
        self._late: Callable[[], bool] = lambda: False
        self.tracker = MemoryTracker(
            lambda: [task.pid for task in tasks(resident.room)], untrusted,
            stopped=lambda: self._late(),
        )  # fmt: skip
        self.tracker.offered(offer)
        self.lanes = lanes
        self._wants = wants
        self._offered = self._wanted = 0
        self._stop = threading.Event()
        self._pace = Pace(
            resident.collectives, resident.usual_rate(), settings.slow_down, sleep=self._sleep
        )
        self._limit = settings.rounds
        self._reporter = reporter
        self._fresh: threading.Thread | None = None
        self._sent = 0
        self._number = 0
        self.rate = 0.0

    def rounds(self, until: float) -> Rounds:
        """Bring memory over until the rewritten part no longer shrinks, or ``until`` (monotonic
        seconds). Raises StepFailed when the destination refuses."""
        before, stale, dirty = float("inf"), 0, 0
        while self._number < self._limit and stale < STALE:
            done = self._round(lambda: self._stop.is_set() or time.monotonic() > until)
            if done is None:
                break
            dirty = done.dirty_bytes
            if dirty <= ENOUGH_S * self.rate:
                break
            stale = stale + 1 if dirty > SHRINKS * before else 0
            before = dirty
        self._reporter.done()
        return Rounds(
            self._number, self._sent, dirty, self.rate, self._pace.lost(),
            self._offered, self._wanted,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        """The standstill does not wait for the pace."""
        self._stop.wait(seconds)

    def hurry(self) -> None:
        """End ``rounds`` wherever they are."""
        self._stop.set()

    def keep_fresh(self) -> None:
        """Go on with rounds in a thread, so that little is left at the standstill."""
        self._fresh = threading.Thread(target=self._keep_fresh, name="pre-copy", daemon=True)
        self._fresh.start()

    def rest(self) -> None:
        """The freeze is near: begin no further round, and interrupt one that keeps it fresh."""
        if self._fresh is not None:
            self._stop.set()

    def stop_rounds(self) -> None:
        """Interrupt a round that is under way; may be called again."""
        self._stop.set()
        if self._fresh is not None:
            self._fresh.join()
            self._fresh = None

    def _keep_fresh(self) -> None:
        try:
            while not self._stop.is_set():
                done = self._round(self._stop.is_set)
                if done is None or self._stop.wait(NAP_S):
                    return
        except LiveshiftError:  # who asks for the freeze meets it again
            return

    def _round(self, late: Callable[[], bool]) -> Round | None:
        """One round; None when it was interrupted: what it has not sent is the next one's."""
        began = time.monotonic()
        self._late = late

        def sink(chunk: memoryview, release: Callable[[], None]) -> None:
            self.lanes.pages(chunk, release)
            self._reporter.moved(len(chunk))

        self._pace.begin()
        self._reporter.round_began(self._number + 1)
        try:
            done = self.tracker.round(sink, self._pace, self._reporter.listed)
            self.lanes.finish()
            took = time.monotonic() - began
            self._offered += done.offered_bytes
            wanted = self._send_wanted()
        except Stopped:
            # Chunks of several lanes overtake each other: what is on its way now must not arrive
            # after what is read of the same pages next.
            self.lanes.finish()
            return None
        self._number += 1
        self._wanted += wanted
        self._sent += done.sent_bytes + wanted
        if done.sent_bytes > max(SOME, done.dirty_bytes / 2):  # others went at no link's rate
            self.rate = done.sent_bytes / took
        self._reporter.round_ended(done.dirty_bytes, self._pace.lost())
        return done

    def _send_wanted(self) -> int:
        """Once, as there may be pages that have gone meanwhile; the bytes."""
        wanted = self._wants()
        sent = self.tracker.again(wanted, self.lanes.pages) if wanted else 0
        if sent:
            self.lanes.finish()
        return sent

    def complete(self) -> None:
        """Return when the destination has all that was sent, what was only named included."""
        self.lanes.finish()
        while self._send_wanted():
            pass

    def interrupt_on(self, stopped: Callable[[], bool]) -> None:
        """From now on the tracker stops whatever it does once this is so."""
        self._late = stopped

    def close(self) -> None:
        """The kernel follows the job's writes no longer. May be called again."""
        self.stop_rounds()
        self.lanes.close()
        self.tracker.close()


class Delta:
    """What is left at the standstill, sent in a thread of its own while CRIU dumps the rest.

    ``table``: where the table of pages is sent; ``page_filter`` tells CRIU what is not its own.
    """

    def __init__(
        self, precopy: Precopy, table: Sender, page_filter: PageFilter, until: float
    ) -> None:
        self._precopy, self._table = precopy, table
        self._filter, self._until = page_filter, until
        self._found: Standstill | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        precopy.interrupt_on(self._stop.is_set)
        self._thread = threading.Thread(target=self._run, name="delta", daemon=True)
        self._thread.start()

    def finish(self) -> Standstill:
        """Return when all of it is at the destination; raises what stood in the way."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        self._table.send(PAGE_TABLE, msgspec.msgpack.encode(self._found.table))
        self._table.send(PAGE_TABLE, b"")
        return self._found

    def stop(self) -> None:
        """Send nothing more; may be called again."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        tracker = self._precopy.tracker
        try:
            tracker.wait_frozen(self._until, self._filter.asked)
            self._found = tracker.standstill(self._precopy.lanes.pages, self._filter.hide)
            self._precopy.complete()
        except BaseException as error:
            self._error = error


def full_dump_because(resident: Resident, settings: Settings) -> str:
    """Why a capsule's memory can't be sent while it trains, in words; "" where it can."""
    if not settings.enabled:
        return "precopy.enabled is false in the cluster file"
    if why := MemoryTracker.probe():
        return why
    size = footprint(resident.room)
    shared = size.copied - size.private
    if shared > SHARED_MOST and shared > size.private / 4:
        return (
            f"its processes share {shared / 1e9:.1f} GB copy on write, of which each would have its"
            " own copy otherwise"
        )
    return ""


def untrusted(pid: int) -> bool:
    """Whether a process's memory may change without the kernel's page tables knowing of it: a
    device that has the pages pinned writes past them."""
    try:
        if gpu_tasks.look(pid, pid, "") is not None:
            return True
        return "VmPin:\t       0 kB" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def words_of_rounds(done: Rounds) -> str:
    """For a person: "3 rounds, 12 MB rewritten meanwhile, the job 5 % slower"."""
    many = f"{done.number} round{'s' if done.number != 1 else ''}"
    words = f"{many}, {done.dirty / 1e6:.0f} MB rewritten in the last"
    if done.lost is not None:
        words += f", the job {done.lost:.0%} slower"
    if done.offered:
        words += f", {done.offered / 1e6:.0f} MB only named"
    if done.wanted:
        words += f", {done.wanted / 1e6:.1f} MB sent that the destination no longer had"
    return words


def words_of_delta(found: Standstill) -> str:
    return f"{found.dirty_bytes / 1e6:.0f} MB rewritten, found within {found.scan_s * 1e3:.0f} ms"
