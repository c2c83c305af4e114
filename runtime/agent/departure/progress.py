# SPDX-License-Identifier: Apache-2.0
"""How far a pre-copy is: the source counts it and reports it several times a second.

:class:`RoundsReporter` counts in the threads that send; :class:`ReportSender` carries its reports
from them to the agent's event loop. Neither ever waits. If a report is lost, the next one makes up
for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

from ....errors import LiveshiftError
from ...messages import Message, Progressed

log = logging.getLogger("liveshift.progress")

EVERY_S = 0.25
WINDOW_S = 1.0
"""The rate is that of the last second: long enough to be steady, short enough to be current."""


class RoundsReporter:
    """Counts the rounds of one pre-copy; any thread may call it.

    ``send`` must neither wait nor raise. Bytes are bytes of memory, uncompressed. Rounds are
    throttled, the freeze is not. So the reporter estimates the freeze with ``carries`` (the known
    bytes per second of the link) or with the rate of the best whole round, if that is higher. Part
    of a round does not count, as bytes on their way count as sent. Short rounds count together.
    The first round does not count: all memory together may be easier to compress.
    """

    def __init__(
        self,
        send: Callable[[Progressed], None],
        migration: str,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
        carries: float = 0.0,
    ) -> None:
        self._send = send
        self._migration = migration
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._round = 0
        self._dirty = 0
        self._bytes = 0
        self._before = 0  # bytes sent before this round began
        self._began = 0.0
        self._ended = False  # pages not sent by then need no sending: zeros, or already there
        self._delta: int | None = None  # bytes that the last round found rewritten
        self._slow_down: float | None = None
        self._carries = carries
        self._best = 0.0
        self._short: tuple[int, float] = (0, 0.0)  # bytes and seconds of the short rounds until now
        self._seen: deque[tuple[float, int]] = deque()  # (moment, bytes sent by then)
        self._reported = float("-inf")

    def round_began(self, number: int) -> None:
        """Round ``number`` (from 1) begins; :meth:`listed` says later what it has to send."""
        with self._lock:
            self._round, self._dirty = number, 0
            self._before, self._ended, self._began = self._bytes, False, self._clock()
            self._note()
        self._report()

    def listed(self, dirty: int) -> None:
        """The tracker found ``dirty`` bytes for this round to send; in the first, all memory."""
        with self._lock:
            self._dirty = dirty
        self._report()

    def moved(self, count: int) -> None:
        """``count`` more bytes are on their way."""
        with self._lock:
            self._bytes += count
            self._note()
        self._report()

    def round_ended(self, dirty: int, slow_down: float | None = None) -> None:
        """The round has sent all that it found written, ``dirty`` bytes. ``slow_down``: the share
        of its speed that the job lost, None if that was not measured."""
        with self._lock:
            took = self._clock() - self._began
            self._dirty, self._ended = dirty, True
            if self._round > 1:  # the first round sends all memory, not only what was written
                self._delta = dirty
                sent, seconds = self._short
                sent, seconds = sent + self._bytes - self._before, seconds + took
                if seconds >= self._every_s:  # a shorter time may be that of a single chunk
                    self._best = max(self._best, sent / seconds)
                    sent, seconds = 0, 0.0
                self._short = sent, seconds
            if slow_down is not None:
                self._slow_down = slow_down
            self._note()
        self._report()

    def stopping(self, left: int) -> None:
        """No further round comes: ``left`` bytes remain for the pause."""
        with self._lock:
            self._dirty = self._delta = left
            self._ended = False
            self._note()

    def done(self) -> None:
        """No round follows: send the last report, even shortly after the one before."""
        self._reported = float("-inf")
        self._report()

    def _note(self) -> None:
        now = self._clock()
        self._seen.append((now, self._bytes))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    def _rate(self) -> float:
        """Bytes per second over the last second; 0 before the second look."""
        if len(self._seen) < 2:
            return 0.0
        (began, before), (now, after) = self._seen[0], self._seen[-1]
        return (after - before) / (now - began) if now > began else 0.0

    def _report(self) -> None:
        with self._lock:
            now = self._clock()
            if now - self._reported < self._every_s:
                return
            self._reported = now
            report = self._progress()
        self._send(report)

    def _progress(self) -> Progressed:
        rate = max(self._best, self._carries) or self._rate()
        left = 0 if self._ended else max(0, self._dirty - (self._bytes - self._before))
        delta = self._delta / rate if self._delta is not None and rate else None
        return Progressed(
            self._migration,
            self._round,
            self._bytes,
            self._dirty,
            left,
            self._rate(),
            self._slow_down,
            delta,
            rate,
        )


class ReportSender:
    """Sends reports one at a time, the newest of each migration. No caller waits for them.

    Make it in the event loop; any thread may call it. ``request`` sends a message and returns its
    answer, within ``timeout`` seconds. A report that cannot be delivered is dropped.
    """

    def __init__(
        self, request: Callable[[Message, float], Awaitable[Message | None]], timeout: float
    ) -> None:
        self._request = request
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, Progressed] = {}
        self._work: asyncio.Task[None] | None = None

    def __call__(self, report: Progressed) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the agent with it
            self._loop.call_soon_threadsafe(self._put, report)

    def _put(self, report: Progressed) -> None:
        self._waiting[report.migration] = report
        if self._work is None or self._work.done():
            self._work = self._loop.create_task(self._deliver())

    async def _deliver(self) -> None:
        while self._waiting:
            _, report = self._waiting.popitem()
            try:
                await self._request(report, self._timeout)
            except LiveshiftError as lost:
                log.debug("%s: a report of its progress is lost: %s", report.migration, lost)
