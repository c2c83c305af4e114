# SPDX-License-Identifier: Apache-2.0
"""The source's side of memory that moves while the job runs: rounds, and then what is left.

Each round takes what was written since the one before: the pages are protected again, and then
read, so that whatever is written after that comes in the next. Once every task stands still the
last pass finds out which pages there are (the table, which is what counts) and sends those that
the destination has not got as they are.

Nothing of it stays in the processes: should the tracker end, the job runs on unharmed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .... import cores
from ....errors import StepFailed
from ..engine import PAGE
from . import userfault
from .family import GONE, Family
from .followed import Followed
from .maps import own_ranges
from .pulling import Pace, Pulling, Sink, Stopped, Unhurried
from .ring import Ring
from .source_engine import Pull, Ranges, known_categories
from .standing import wait_stopped

SLOTS = 48
"""Chunks on their way at once, of 1 MiB each: some 5 ms of a link of 100 Gbit/s, 40 ms of 10."""

READERS = 16
"""Threads at most that read one capsule's memory: memory bandwidth is shared out by then."""


@dataclass(frozen=True)
class Round:
    """What one pass of pre-copy did; ``dirty_bytes`` were listed as written, ``sent_bytes`` went
    out (chunks, with their heads)."""

    number: int
    dirty_bytes: int
    sent_bytes: int
    seconds: float
    processes: int
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
        slots: int = SLOTS,
    ) -> None:  # fmt: skip
        """``stopped``: whether a round is not wanted any more; ``threads``: how many read."""
        self._tasks = tasks
        self._compare = compare
        self._stopped = stopped
        self._ring = Ring(slots)
        self._pulling = Pulling(threads or cores.threads(READERS), self._ring)
        self._family = Family()
        self._rounds = 0
        self._passes = 0
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
        self._scan(list(self._family), only_look=True)
        return sum(process.written.size for process in self._family)

    def round(
        self, sink: Sink, pace: Pace | None = None,
        listed: Callable[[int], None] = lambda _: None,
    ) -> Round:  # fmt: skip
        """Send what was written since the last round; the first one sends everything.

        ``listed`` hears how many bytes that are, as far as it is known: before they are sent. It
        may raise Stopped.
        Raises Stopped when it is not wanted any more (what was not sent counts as written), and
        what the sink raised, after which this tracker is of no more use.
        """
        began = time.monotonic()
        self._refresh()
        dirty = sent = 0
        for generation in self._family.generations():
            self._scan(generation)
            there = [process for process in generation if process in self._family]
            dirty += sum(process.written.size for process in there)
            try:
                listed(dirty)
            except Stopped:  # not worth it
                for process in there:
                    process.interrupted()
                raise
            sent += self._pull(there, sink, pace or Unhurried())
            # Children may refer to pages of their parents only once those are on their way: should
            # a reference overtake its page, the page is asked for.
            if sent and not self._ring.wait_all_free(self._stopped):
                raise Stopped
            self._passes += 1
        self._rounds += 1
        why = {p.who.inner: p.untracked or p.distrusted for p in self._family}
        untracked = {inner: words for inner, words in why.items() if words}
        seconds = time.monotonic() - began
        return Round(self._rounds - 1, dirty, sent, seconds, len(self._family), untracked)

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
        processes = self._family.living()
        try:
            for process in processes:
                process.ranges = own_ranges(process.pid, process.who.locked)
            ranges = {process.who.inner: process.ranges for process in processes}
            hide(ranges)
            self._pulling.scan([look for p in processes for look in p.looks_standing(self._known)])
        except GONE as gone:
            raise StepFailed("memory", f"a task has ended while it was frozen: {gone}") from gone
        for process in processes:
            process.judge(distrust=self._compare(process.pid))
        scanned = time.monotonic()
        sent = 0
        for generation in self._family.generations():
            sent += self._pull(generation, sink, Unhurried(), all_there=True)
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
        by_inner = self._family.by_inner_pid()
        asked: dict[int, Followed] = {}
        for inner, address, pages in wanted:
            if process := by_inner.get(inner):
                if inner not in asked:
                    process.written.clear()
                asked[inner] = process
                process.sent.forget(address, address + pages * PAGE, process.written)
        sent = self._pull(list(asked.values()), sink, Unhurried(), refer=False)
        self._passes += 1
        return sent

    def close(self) -> None:
        """Let go of the processes; each is held up for some 10 ms per GiB that is tracked."""
        self._family.close()
        self._pulling.close()
        self._ring.close()

    def _refresh(self) -> None:
        if self._broken:
            raise StepFailed("memory", "what was sent before is not known any more")
        self._family.refresh(self._tasks())

    def _scan(self, processes: list[Followed], only_look: bool = False) -> None:
        def scan(process: Followed) -> None:
            try:
                process.look(self._known, only_look)
            except GONE:
                self._family.forget(process)

        self._pulling.scan([lambda p=p: scan(p) for p in processes])  # type: ignore[misc]

    def _pull(
        self, processes: list[Followed], sink: Sink, pace: Pace, refer: bool = True,
        all_there: bool = False,
    ) -> int:  # fmt: skip
        """``refer``: to pages of their parents; ``all_there``: each page must be readable."""
        pulls: dict[Followed, Pull] = {}
        for process in processes:
            if process.written.size:
                try:
                    pull = process.pull(self._rounds, self._passes, alone=len(self._family) == 1)
                except GONE:
                    self._ended(process, all_there)
                    continue
                if refer and (parent := self._family.parent(process)):
                    pull.refer_to(parent.who.inner, parent.sent)
                pulls[process] = pull
        sent = self._send(list(pulls), list(pulls.values()), sink, pace)
        for process, pull in pulls.items():
            if pull.ended:
                self._ended(process, all_there)
            pages, first = pull.unreadable
            if pages and all_there:
                what = f"the page at {first:#x} of process {process.who.inner} cannot be read"
                raise StepFailed("memory", what)
        return sent

    def _ended(self, process: Followed, frozen: bool) -> None:
        if frozen:
            what = f"process {process.who.inner} has ended while it was frozen"
            raise StepFailed("memory", what)
        self._family.forget(process)

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
