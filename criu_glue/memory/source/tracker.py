# SPDX-License-Identifier: Apache-2.0
"""The tracker: the source's side of pre-copy. It makes rounds, then sends the final dirty set.

Each round takes the pages that were written since the round before. The tracker protects the pages
again and then reads them, so a later write comes in the next round. While the capsule is frozen,
the last pass finds all pages that exist. Their list, the table, decides which memory the
destination restores. The last pass sends the final dirty set: the pages that the destination does
not have with their present content.

A tracker may outlive a freeze whose processes go on, and serve the next freeze. The last pass only
looks, so the kernel still knows which pages were written since the last round. The owner of such a
tracker says what came of each image: ``image_complete``, or ``forget_sent`` if that is not certain.

Nothing stays in the processes. If the tracker ends, the job runs on unharmed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .... import cores
from ....errors import StepFailed
from ..engine import PAGE
from . import source_engine, userfault
from .family import GONE, Family
from .followed import Followed
from .maps import own_ranges
from .pulling import Pulling, PullStopped, Sink, Throttle, unthrottled
from .ring import ChunkRing
from .source_engine import Pull, Ranges
from .standing import wait_stopped

SLOTS = 48
"""At most this many chunks of 1 MiB are on their way at the same time. A link of 100 Gbit/s sends
them in some 4 ms, one of 10 Gbit/s in 40 ms."""

READERS = 16
"""At most this many threads read one capsule's memory. They use all memory bandwidth, so more
threads would not help."""


@dataclass(frozen=True)
class TrackedRound:
    """The result of one round. ``dirty_bytes`` is the size of the pages listed as written,
    ``sent_bytes`` the size of the chunks sent, heads included."""

    dirty_bytes: int
    sent_bytes: int
    processes: int
    untracked: dict[int, str]
    """The processes (inner pids) that the last pass will read in full, and the reasons."""


@dataclass(frozen=True)
class FrozenSet:
    """The result of the last pass. Its search for pages took ``scan_s`` seconds."""

    dirty_bytes: int
    sent_bytes: int
    table: dict[int, dict[str, Any]]
    """By inner pid: {"incarnation": n, "runs": pairs of address and pages, 64 bits each}."""
    ranges: dict[int, Ranges]
    scan_s: float


class MemoryTracker:
    """Follows the memory of the processes that ``tasks`` returns (the host's pids).

    ``compare`` is true for a process whose memory a GPU may write past the processor's page tables.
    (The tracker finds other pinned memory itself, see writers.py.) At the freeze it reads such a
    process in full, and sends what differs from what it sent before. Only one thread at a time may
    use a tracker.
    """

    def __init__(
        self,
        tasks: Callable[[], Sequence[int]],
        compare: Callable[[int], bool] = lambda _: False,
        *,
        stopped: Callable[[], bool] = lambda: False,
        threads: int | None = None,
        slots: int = SLOTS,
    ) -> None:
        """``threads``: how many threads read."""
        self._tasks = tasks
        self._compare = compare
        self.stopped = stopped
        """Becomes true when the round must stop. It may be replaced between two rounds."""
        self._ring = ChunkRing(slots)
        self._pulling = Pulling(threads or cores.threads(READERS), self._ring)
        self._family = Family()
        self._rounds = 0
        self._passes = 0
        self._broken = False

    @staticmethod
    def probe() -> str:
        """Return why this host cannot follow memory, as text, or ""."""
        return userfault.probe()

    def count_written(self) -> int:
        """Return how many bytes were written since the last count or round. It sends nothing."""
        self._refresh()
        self._scan(list(self._family), only_count=True)
        return sum(process.written.size for process in self._family)

    def round(
        self,
        sink: Sink,
        throttle: Throttle = unthrottled,
        listed: Callable[[int], None] = lambda _: None,
    ) -> TrackedRound:
        """Send the pages written since the last round. The first round sends all pages.

        Before each generation of processes is sent, ``listed`` gets the number of bytes listed so
        far. It may raise PullStopped. Raises PullStopped when the round must stop; pages that were
        not sent then count as written. Raises also what the sink has raised; after that this
        tracker cannot be used any more, except after :meth:`forget_sent`.
        """
        self._refresh()
        dirty = sent = 0
        for generation in self._family.generations():
            self._scan(generation)
            there = [process for process in generation if process in self._family]
            dirty += sum(process.written.size for process in there)
            try:
                listed(dirty)
            except PullStopped:  # the caller has given the round up
                for process in there:
                    process.interrupted()
                raise
            sent += self._pull(there, sink, throttle)
            # Children may refer to pages of their parents only once those are on their way. If a
            # reference overtakes its page, the destination asks for the page.
            if sent and not self._ring.wait_all_free(self.stopped):
                raise PullStopped
            self._passes += 1
        self._rounds += 1
        why = {p.who.inner: p.untracked or p.untrusted for p in self._family}
        untracked = {inner: words for inner, words in why.items() if words}
        return TrackedRound(dirty, sent, len(self._family), untracked)

    def wait_frozen(self, until: float, known: Callable[[], bool] = lambda: False) -> None:
        """Wait until CRIU has stopped every task. ``known``: whether CRIU itself reports that.
        Raises StepFailed at ``until`` (monotonic seconds), or once ``stopped`` is true."""
        try:
            wait_stopped(self._tasks, until, self.stopped, known)
        except TimeoutError as late:
            raise StepFailed("freeze", f"CRIU did not stop the tasks in time: {late}") from late

    def send_final_set(
        self, sink: Sink, hide: Callable[[dict[int, Ranges]], None] = lambda _: None
    ) -> FrozenSet:
        """Send the final dirty set. All tasks must be frozen. ``hide`` gets the ranges that the
        tracker carries, before the scan. Returns when the last chunk was handed on, not when it
        arrived.

        Raises StepFailed, PullStopped or what the sink has raised.
        """
        began = time.monotonic()
        self._refresh()
        processes = self._family.living()
        try:
            for process in processes:
                process.ranges = own_ranges(process.pid, process.who.locked)
            ranges = {process.who.inner: process.ranges for process in processes}
            hide(ranges)
            self._pulling.scan([look for p in processes for look in p.looks_standing()])
        except GONE as gone:
            raise StepFailed("memory", f"a task has ended while it was frozen: {gone}") from gone
        for process in processes:
            process.classify(all_stale=self._compare(process.pid))
        scanned = time.monotonic()
        sent = 0
        try:
            for generation in self._family.generations():
                sent += self._pull(generation, sink, unthrottled, all_there=True)
        except BaseException:
            for process in processes:  # the last of them were listed and not read
                process.interrupted()
            raise
        self._passes += 1
        return FrozenSet(
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
            scan_s=scanned - began,
        )

    def again(self, wanted: Iterable[tuple[int, int, int]], sink: Sink) -> int:
        """Send the pages that the destination asks for, as (inner pid, address, pages). Return the
        bytes of the chunks. Pages that were never sent are left out.

        At the freeze this completes the final dirty set. Before, it only saves time later.
        """
        by_inner = {process.who.inner: process for process in self._family}
        asked: dict[int, Followed] = {}
        for inner, address, pages in wanted:
            if process := by_inner.get(inner):
                if inner not in asked:
                    process.written.clear()
                asked[inner] = process
                process.sent.forget(address, address + pages * PAGE, process.written)
        sent = self._pull(list(asked.values()), sink, unthrottled, refer=False)
        self._passes += 1
        return sent

    def digest(self) -> bytes:
        """Return the digest (digest.h) of the image that the last :meth:`send_final_set` has
        sent. The destination makes the same digest of the pages that it has.

        Call it once :meth:`again` has sent what was asked for, and before the next round. The
        processes may run: it uses the record of what was sent, not their memory. Raises StepFailed
        if a page of the table was not sent.
        """
        processes = self._family.living()
        try:
            return source_engine.digest((p.who.inner, p.sent, p.present) for p in processes)
        except OSError as error:
            raise StepFailed("memory", "a page of the image was not sent") from error

    def image_complete(self) -> None:
        """Record that the destination has the whole image of the last :meth:`send_final_set`.
        Call it before the next round.

        From now on the destination need not have other pages than those of the table: if such a
        page exists again, it is sent again. A process that the last pass had to read in full may be
        tracked again. Raises OSError (ENOMEM).
        """
        for process in self._family:
            process.image_complete()

    def forget_sent(self, least: int = 1) -> None:
        """Record that the destination has nothing of what was sent: the next round sends all pages.
        A tracker whose sink has raised an error is usable again.

        ``least``: the lowest incarnation of a process from now on. A store drops what comes under
        a lower incarnation than it knows, for example from an earlier tracker.
        """
        self._family.forget_sent(least)
        self._broken = False

    def rest(self) -> None:
        """Give back the memory for chunks until the next round. The tracking goes on."""
        self._ring.rest()

    def close(self) -> None:
        """Stop tracking. The kernel holds each process for some 10 ms per GiB that is tracked."""
        self._family.close()
        self._pulling.close()
        self._ring.close()

    def _refresh(self) -> None:
        if self._broken:
            raise StepFailed("memory", "the tracker has lost the record of what it sent before")
        self._family.refresh(self._tasks())

    def _scan(self, processes: list[Followed], only_count: bool = False) -> None:
        def scan(process: Followed) -> None:
            try:
                process.scan(only_count)
            except GONE:
                self._family.forget(process)

        self._pulling.scan([lambda p=p: scan(p) for p in processes])  # type: ignore[misc]

    def _pull(
        self,
        processes: list[Followed],
        sink: Sink,
        throttle: Throttle,
        refer: bool = True,
        all_there: bool = False,
    ) -> int:
        """Read and send the listed pages of ``processes``. Return the bytes of the chunks.

        ``refer``: processes may refer to pages of their parents. ``all_there``: each page must be
        readable, else it raises StepFailed.
        """
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
        try:
            sent = self._pulling.pull(list(pulls.values()), sink, throttle, self.stopped)
        except BaseException as error:
            self._broken = not isinstance(error, PullStopped)
            for process in pulls:
                process.interrupted()
            raise
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
