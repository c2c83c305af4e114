# SPDX-License-Identifier: Apache-2.0
"""The source's side of memory that moves while the job runs: rounds, and then what is left.

Each round takes what was written since the one before: the pages are protected again, and then
read, so that whatever is written after that comes in the next. Once every task stands still the
last pass finds out which pages there are (the table, which is what counts) and sends those that
the destination has not got as they are.

Nothing of it stays in the processes: should the tracker end, the job runs on unharmed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import StepFailed
from . import userfault
from .followed import Followed
from .maps import About, about, own_ranges
from .pulling import Pace, Pulling, Sink, Stopped, Unhurried
from .ring import Ring
from .source_engine import PAGE, Offer, Pull, Ranges, known_categories
from .standing import wait_stopped

SLOTS = 48
"""Chunks on their way at once, of 1 MiB each: some 5 ms of a link of 100 Gbit/s, 40 ms of 10."""

_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class Round:
    """What one pass of pre-copy did; ``dirty_bytes`` were listed as written, ``sent_bytes`` went
    out (chunks, with their heads)."""

    number: int
    dirty_bytes: int
    sent_bytes: int
    seconds: float
    processes: int
    offered_bytes: int
    """Memory that the destination has said to have already, and was not sent."""
    untracked: dict[int, str]
    """Processes (inner pids) that will be read in full at the standstill, and why."""


@dataclass(frozen=True)
class Standstill:
    """What the last pass found and did. ``scan_s`` of ``seconds`` went into finding out."""

    dirty_bytes: int
    sent_bytes: int
    table: dict[int, dict[str, Any]]
    """Inner pid: {"incarnation": n, "runs": pairs of address and pages, 64 bits each}."""
    ranges: dict[int, Ranges]
    seconds: float
    scan_s: float


class MemoryTracker:
    """Follows the memory of the processes that ``tasks`` names (the host's pids).

    ``compare`` tells of which of them memory may change without the processor's page tables being
    asked (a GPU's; others that pin memory are known, see writers.py): they are read all again at
    the standstill, and what differs from what was sent goes out. One thread may use it at a time.
    """

    def __init__(
        self, tasks: Callable[[], Sequence[int]], compare: Callable[[int], bool] = lambda _: False,
        *, stopped: Callable[[], bool] = lambda: False, threads: int | None = None,
        slots: int = SLOTS, offer: bytes = b"",
    ) -> None:  # fmt: skip
        """``stopped``: whether a round is not wanted any more; ``threads``: how many read;
        ``offer``: what the destination has anyway (Donors.offer), which rounds only name. Raises
        StepFailed for an offer that is none."""
        try:
            self._offer = Offer(offer) if offer else None
        except ValueError as error:
            raise StepFailed("memory", f"the destination offers {error}") from error
        self._tasks = tasks
        self._compare = compare
        self._stopped = stopped
        self._ring = Ring(slots)
        self._pulling = Pulling(threads or os.cpu_count() or 1, self._ring)
        self._followed: dict[int, Followed] = {}
        self._incarnations: dict[int, int] = {}  # by inner pid, the last one
        self._rounds = 0
        self._passes = 0
        self._offered = 0  # pages, in this round
        self._broken = False
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._known = known_categories(pagemap)
        os.close(pagemap)

    @staticmethod
    def probe() -> str:
        """ "" or why memory cannot be followed here, in words."""
        return userfault.probe()

    def look(self) -> int:
        """How many bytes were written since the last look or round, which is not sent now."""
        self._refresh()
        self._scan(list(self._followed.values()), only_look=True)
        return sum(process.written.size for process in self._followed.values())

    def round(
        self, sink: Sink, pace: Pace | None = None,
        listed: Callable[[int], None] = lambda _: None,
    ) -> Round:  # fmt: skip
        """Send what was written since the last round; the first one sends everything.

        ``listed`` hears how many bytes that are, as far as it is known: before they are sent.
        Raises Stopped when it is not wanted any more (what was not sent counts as written), and
        what the sink raised, after which this tracker is of no more use.
        """
        began = time.monotonic()
        self._refresh()
        dirty = sent = 0
        self._offered = 0
        for generation in self._generations():
            self._scan(generation)
            there = [process for process in generation if process.pid in self._followed]
            dirty += sum(process.written.size for process in there)
            listed(dirty)
            sent += self._pull(there, sink, pace or Unhurried())
            # Children may refer to pages of their parents only once those have arrived.
            if sent and not self._ring.wait_all_free(self._stopped):
                raise Stopped
            self._passes += 1
        self._rounds += 1
        why = {p.who.inner: p.untracked or p.distrusted for p in self._followed.values()}
        untracked = {inner: words for inner, words in why.items() if words}
        seconds = time.monotonic() - began
        return Round(
            self._rounds - 1, dirty, sent, seconds, len(self._followed), self._offered * PAGE,
            untracked,
        )  # fmt: skip

    def wait_frozen(self, until: float, known: Callable[[], bool] = lambda: False) -> None:
        """Wait for every task to be stopped by CRIU; raises StepFailed at ``until`` (monotonic), or
        once nobody wants it any more. ``known``: whether CRIU itself lets know that they are."""
        try:
            wait_stopped(self._tasks, until, self._stopped, known)
        except TimeoutError as late:
            raise StepFailed("freeze", f"CRIU did not stop the tasks in time: {late}") from late

    def standstill(
        self, sink: Sink, hide: Callable[[dict[int, Ranges]], None] = lambda _: None
    ) -> Standstill:
        """Send what is left, all tasks being frozen; ``hide`` is told at once what is ours to
        carry. Returns when the last chunk was handed on, not when it has arrived.

        Raises StepFailed, Stopped or what the sink raised.
        """
        began = time.monotonic()
        self._refresh()
        processes = [p for p in self._followed.values() if p.who.state not in "ZX"]
        try:
            for process in processes:
                process.ranges = own_ranges(process.pid, process.who.locked)
            ranges = {process.who.inner: process.ranges for process in processes}
            hide(ranges)
            self._pulling.scan([self._standing(process) for process in processes])
        except _GONE as gone:
            raise StepFailed("memory", f"a task has ended while it was frozen: {gone}") from gone
        scanned = time.monotonic()
        sent = 0
        for generation in self._generations():
            sent += self._pull(generation, sink, Unhurried(), whole=True)
        self._passes += 1
        return Standstill(
            dirty_bytes=sum(process.written.size for process in processes),
            sent_bytes=sent,
            table={
                process.who.inner: {
                    "incarnation": process.incarnation,
                    "runs": process.present.runs(),
                }
                for process in processes
            },
            ranges=ranges,
            seconds=time.monotonic() - began,
            scan_s=scanned - began,
        )

    def again(self, wanted: Iterable[tuple[int, int, int]], sink: Sink) -> int:
        """Send the pages that the destination asks for, (inner pid, address, pages) each, as they
        are; the bytes. What was never sent is passed over.

        At the standstill this completes what was sent; before it, it only hastens things.
        """
        by_inner = {process.who.inner: process for process in self._followed.values()}
        asked: dict[int, Followed] = {}
        for inner, address, pages in wanted:
            if process := by_inner.get(inner):
                if inner not in asked:
                    process.written.clear()
                asked[inner] = process
                process.sent.forget(address, address + pages * PAGE, process.written)
        pulls = [process.pull(self._rounds, self._passes, None) for process in asked.values()]
        self._passes += 1
        return self._send(list(asked.values()), pulls, sink, Unhurried())

    def close(self) -> None:
        """Let go of the processes; each is held up for some 25 ms per GiB that is tracked."""
        for process in self._followed.values():
            process.close()
        self._followed.clear()
        self._pulling.close()

    def _refresh(self) -> None:
        """Follow those who have come, forget those who have gone."""
        if self._broken:
            raise StepFailed("memory", "what was sent before is not known any more")
        found: dict[int, Followed] = {}
        for pid in self._tasks():
            with contextlib.suppress(*_GONE):
                who = about(pid)
                known = self._followed.pop(pid, None)
                if known is not None and known.who.started == who.started:
                    known.who = who
                    found[pid] = known
                else:
                    found[pid] = self._new(pid, who, known)
        for gone in self._followed.values():
            self._drop(gone)
        self._followed = found

    def _new(self, pid: int, who: About, earlier: Followed | None) -> Followed:
        if earlier is not None:
            self._drop(earlier)
        return Followed(pid, who, self._incarnations.get(who.inner, 0) + 1)

    def _drop(self, process: Followed) -> None:
        self._incarnations[process.who.inner] = process.incarnation
        process.close()

    def _generations(self) -> Iterator[list[Followed]]:
        """The processes, parents before their children, the living only."""
        left = {pid: p for pid, p in self._followed.items() if p.who.state not in "ZX"}
        while left:
            first = [p for p in left.values() if p.who.parent not in left]
            first = first or list(left.values())
            yield first
            for process in first:
                left.pop(process.pid, None)

    def _scan(self, processes: list[Followed], only_look: bool = False) -> None:
        def scan(process: Followed) -> None:
            try:
                process.look(self._known, only_look)
            except _GONE:
                self._forget(process)

        self._pulling.scan([lambda p=p: scan(p) for p in processes])  # type: ignore[misc]

    def _standing(self, process: Followed) -> Callable[[], None]:
        distrust = self._compare(process.pid)
        return lambda: process.look_standing(self._known, distrust)

    def _forget(self, process: Followed) -> None:
        if self._followed.pop(process.pid, None) is not None:
            self._drop(process)

    def _pull(self, processes: list[Followed], sink: Sink, pace: Pace, whole: bool = False) -> int:
        """``whole``: every page must be readable."""
        listed = [process for process in processes if process.written.size]
        pulls = [
            process.pull(
                self._rounds,
                self._passes,
                self._followed.get(process.who.parent),
                None if whole else self._offer,
            )
            for process in listed
        ]
        sent = self._send(listed, pulls, sink, pace)
        for process, pull in zip(listed, pulls, strict=True):
            self._offered += pull.offered
            pages, first = pull.unreadable
            if whole and (pull.ended or pages):
                what = f"its page at {first:#x} cannot be read" if pages else "it has ended"
                raise StepFailed("memory", f"process {process.who.inner}: {what}")
            if pull.ended:
                self._forget(process)
        return sent

    def _send(
        self, processes: list[Followed], pulls: Sequence[Pull], sink: Sink, pace: Pace
    ) -> int:
        try:
            return self._pulling.pull(pulls, sink, pace, self._stopped)
        except BaseException as error:
            self._broken = not isinstance(error, Stopped)
            for process in processes:
                process.interrupted()
            raise
