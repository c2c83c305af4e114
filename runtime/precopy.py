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

from ..criu_glue.memory.tracker import Interrupted, MemoryTracker, Round, Standstill
from ..criu_glue import gpu_tasks
from ..criu_glue.memory import tracker
from ..criu_glue.page_filter import PageFilter
from ..criu_glue.survey import tasks
from ..errors import LiveshiftError, StepFailed
from .config import Precopy as Settings
from .pace import Pace
from .progress import Reporter
from .resident import Resident
from .wire import PAGE_TABLE, Lanes, Sender

ENOUGH_S = 0.02
"""A round that would take no longer than this at standstill is as good as none."""

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


class Precopy:
    """That of one capsule; ``reporter`` is told how far it is."""

    def __init__(
        self, resident: Resident, lanes: Lanes, settings: Settings, reporter: Reporter
    ) -> None:
        self.tracker = MemoryTracker(lambda: [task.pid for task in tasks(resident.room)], untrusted)
        self.lanes = lanes
        self._pace = Pace(resident.collectives, resident.usual_rate(), settings.slow_down)
        self._limit = settings.rounds
        self._reporter = reporter
        self._stop = threading.Event()
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
        return Rounds(self._number, self._sent, dirty, self.rate, self._pace.lost())

    def hurry(self) -> None:
        """End ``rounds`` wherever they are."""
        self._stop.set()

    def keep_fresh(self) -> None:
        """Go on with rounds in a thread, so that little is left at the standstill."""
        self._fresh = threading.Thread(target=self._keep_fresh, name="pre-copy", daemon=True)
        self._fresh.start()

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
        """One round; None when it was interrupted."""
        began = time.monotonic()

        def sink(chunk: memoryview, release: Callable[[], None]) -> None:
            if late():
                release()
                raise Interrupted
            self.lanes.pages(chunk, release)
            self._reporter.moved(len(chunk))

        self._reporter.round_began(self._number + 1, 0)
        try:
            done = self.tracker.round(sink, self._pace)
        except Interrupted:
            return None
        self.lanes.finish()
        self._number += 1
        self._sent += done.sent_bytes
        seconds = time.monotonic() - began
        if done.sent_bytes > 1 << 20:
            self.rate = done.sent_bytes / seconds
        self._reporter.round_ended(done.dirty_bytes, self._pace.lost())
        return done

    def close(self) -> None:
        """The kernel follows the job's writes no longer. May be called again."""
        self.stop_rounds()
        self.lanes.close()
        self.tracker.close()


class Delta:
    """What is left at the standstill, sent in a thread of its own while CRIU dumps the rest."""

    def __init__(self, precopy: Precopy, table: Sender, hide: PageFilter, until: float) -> None:
        self.found: Standstill | None = None
        self.frozen_after = 0.0
        self._error: BaseException | None = None
        self._stopped = False
        self._tracker, self._lanes = precopy.tracker, precopy.lanes
        self._table, self._hide, self._until = table, hide, until
        self._thread = threading.Thread(target=self._run, name="delta", daemon=True)
        self._thread.start()

    def finish(self) -> Standstill:
        """Return when all of it is at the destination; raises what stood in the way."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self.found is not None
        self._lanes.finish()
        self._table.send(PAGE_TABLE, msgspec.msgpack.encode(self.found.table))
        self._table.send(PAGE_TABLE, b"")
        return self.found

    def stop(self) -> None:
        """Send nothing more; may be called again."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        def sink(chunk: memoryview, release: Callable[[], None]) -> None:
            if self._stopped:
                release()
                raise StepFailed("dump", "stopped, because the dump has failed")
            self._lanes.pages(chunk, release)

        try:
            self._tracker.wait_frozen(self._until, lambda: self._stopped)
            self.found = self._tracker.standstill(sink, self._hide.hide)
        except BaseException as error:
            self._error = error


def full_dump_because(resident: Resident, settings: Settings) -> str:
    """Why a capsule's memory can't be sent while it trains, in words; "" where it can."""
    if not settings.enabled:
        return "precopy.enabled is false in the cluster file"
    if why := tracker.probe():
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
    return words


def words_of_delta(found: Standstill) -> str:
    pages = sum(count for process in found.table.values() for _, count in process["runs"])
    return f"{found.dirty_bytes / 1e6:.0f} MB rewritten of {pages * 4096 / 1e6:.0f} MB"
