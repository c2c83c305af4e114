# SPDX-License-Identifier: Apache-2.0
"""How fast memory is read while its job trains, and what that costs the job.

The job's speed is its collectives per second, before the pre-copy and during it. Without a cap
(``precopy.slow_down``) memory is read at the speed that cost/model.py chose, and the throttle only
measures what a byte costs the job. With a cap the job loses at most that share of its speed.

The cost of a byte depends on machine and job: a core that reads, one that encrypts, memory
bandwidth, and a fault at the first write to each page that was read. So the throttle adjusts the
bytes per second until the job loses as much as the cap allows. One look at the job takes a few
steps and is noisy. Several together show what a byte costs. A single look raises the rate only a
little. The throttle pays back later what the job lost beyond the aim (``AIM``).

Before the first look the throttle knows only what reading costs this agent. Reading then takes half
of the allowed share of all cores' time. For a job without collectives the kernel reports how far it
is held up (run_time.py). Such a job may lose more than that, so the rate never exceeds that half.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....cores import usable
from ..host.reading_cost import BYTES_PER_CPU_SECOND, OF_THIS_AGENT, ReadingCost

LEAST, UNSEEN_MOST = 25e6, 2e9
"""Bytes per second. ``LEAST``: a slower pre-copy would never end. ``UNSEEN_MOST``: the upper limit
until the job's loss is known, as CPU time does not show the loss of memory bandwidth."""

AIM = 0.75
"""The part of the allowed loss at which the throttle aims; noise stays below the allowed loss."""

FADES = 0.7
"""Decay factor for earlier looks at what a byte costs."""

SLOWER, FASTER = 0.25, 1.5
"""The smallest and the largest factor by which one look changes the rate."""

PAID_IN_S, EXCESS_S = 10.0, 20.0
"""The throttle pays back a loss beyond the aim within ``PAID_IN_S`` seconds, or within one look if
that is longer. The excess is at most the aimed loss of ``EXCESS_S`` seconds, since liveshift does
not cause longer losses such as checkpoints."""

LEAST_AIM = 0.25
"""While there is an excess, the throttle still aims at this part of the aimed loss."""

LOOK_S, LOOK_COLLECTIVES, LOOK_GAPS = 0.5, 20, 4
"""A look at the job takes at least this many seconds, this many collectives, and this many times
the longest gap between collectives. A job may make all its collectives at the end of a step, and a
shorter look would then see almost none or too many."""

BEHIND_GAPS = 2
"""A look also ends when the job is this many gaps behind its usual speed, if a gap was seen. A slow
job has long gaps; without this rule, the slower it is, the later the look would end."""

STANDS_S = 30.0
"""After this many seconds without collectives a look ends in any case: liveshift may have stopped
the job."""

COUNT_S = 0.1
"""The collectives are counted every COUNT_S seconds."""

BURST_S = 0.1
"""A reader that has read too little may catch up on at most this many seconds."""

NAP_S = 0.25
"""The longest single sleep, in seconds."""


class Throttle:
    """Each reading thread calls ``account`` after each batch; it sleeps as long as necessary.

    ``collectives`` returns the finished collectives of the job. ``usual`` is their rate per second
    before pre-copy (0: unknown, or the job makes none). ``share`` is the part of that rate that the
    job may lose (None: no cap). If the job turns out to be faster, the throttle corrects ``usual``:
    it was measured while the job began. ``gap`` is the longest time in seconds without collectives
    between two steps (0: unknown).
    """

    def __init__(
        self,
        collectives: Callable[[], int],
        usual: float,
        share: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        cpus: float | None = None,
        cost: ReadingCost = OF_THIS_AGENT,
        gap: float = 0.0,
        sees_all: bool = True,
        least: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``sees_all``: whether ``collectives`` shows all that the job loses. ``least`` returns the
        bytes per second that a deadline needs: neither cap nor limit goes below this."""
        self._usual = usual
        self._sees_all = sees_all
        self._share = share
        self._limit = float("inf")
        self._least = least
        self._clock, self._sleep = clock, sleep
        # If the job uses all cores, it loses the share of them that we take. Half of the allowed
        # share is left for other costs: faults, bandwidth, hosts that share a machine.
        self._budget = (share or 0.0) / 2 * (cpus or usable())  # CPU seconds per second
        self._cost = cost
        self.rate = self._affordable()
        """Bytes per second that the throttle allows now."""
        self.slow_down: float | None = None
        """The share of its speed that the job lost in the last look; negative: it was faster."""
        self._turn = threading.Lock()
        self._collectives = collectives
        self._job: _Counted | None = None  # set by the first batch
        self._looked = self._due = clock()
        self._seen = 0  # collectives at the last look
        self._read = 0  # bytes read since the last look
        # Seconds that the job lost, the bytes read and the seconds passed meanwhile; all decay.
        self._cost_s = self._cost_bytes = self._cost_of_s = 0.0
        self._excess = 0.0  # seconds lost beyond the aim
        self._gap = gap

    def set_limit(self, rate: float) -> None:
        """The chosen way reads at most ``rate`` bytes per second."""
        self._limit = rate

    def account(self, read: int) -> None:
        """The caller has read ``read`` bytes; sleep until it may read the next ones."""
        with self._turn:
            now = self._clock()
            self._read += read
            readers = self._cost.count(id(self), read, now)
            if self.slow_down is None:
                self.rate = self._affordable(readers)
            if self._usual and self._job is None:
                self._job, self._looked = _Counted(self._collectives, now), now
            if self._job is not None and self._job.count(now) and self._is_time(self._job, now):
                self._observe(self._job, now)
            if not self._sees_all:
                self.rate = min(self.rate, self._affordable(readers))
            rate = max(min(self.rate, self._limit), self._least())
            self._due = max(self._due, now - BURST_S) + read / rate
            due = self._due - now
        while due > 0:
            self._sleep(min(due, NAP_S))
            due -= NAP_S

    @property
    def per_byte(self) -> float | None:
        """Seconds that the job loses for each byte read; None: not known."""
        return self._cost_s / self._cost_bytes if self._cost_bytes else None

    def lost(self) -> float | None:
        """The share of its speed that the job lost since the beginning; None: not known."""
        if self._job is None:
            return None
        now = self._clock()
        seconds = now - self._job.began
        if seconds < LOOK_S:
            return None
        self._job.count(now, at_once=True)
        return max(0.0, 1 - self._job.done / seconds / self._usual)

    def _affordable(self, readers: int = 1) -> float:
        """Bytes per second; several readers divide the allowed CPU time between them."""
        if self._share is None:
            return float("inf")
        per_byte = self._cost.per_byte
        if self._usual and self._sees_all:  # try no higher rate before the first look at the job
            per_byte = max(per_byte, 1 / BYTES_PER_CPU_SECOND)
        return min(UNSEEN_MOST, max(LEAST, self._budget / readers / per_byte))

    def _is_time(self, job: _Counted, now: float) -> bool:
        since = now - self._looked
        if since < LOOK_S or since * self._usual < LOOK_COLLECTIVES:
            return False
        behind = since - (job.done - self._seen) / self._usual
        return (
            since >= LOOK_GAPS * job.gap(now)
            or 0 < BEHIND_GAPS * self._gap < behind
            or (since >= STANDS_S and job.stands(now))
        )

    def _observe(self, job: _Counted, now: float) -> None:
        seconds = now - self._looked
        self.slow_down = 1 - (job.done - self._seen) / seconds / self._usual
        lost = self.slow_down * seconds
        self._cost_s = self._cost_s * FADES + lost
        self._cost_bytes = self._cost_bytes * FADES + self._read
        self._cost_of_s = self._cost_of_s * FADES + seconds
        if self._cost_s < 0:  # reading makes no job faster, so its usual speed was underestimated
            self._usual *= 1 - self._cost_s / self._cost_of_s
            self._cost_s = 0.0
        if self._share is not None:
            self._turn_rate(self._share, lost, seconds)
        self._looked, self._seen, self._read = now, job.done, 0
        self._gap = job.gap(now)
        job.gap_fades()

    def _turn_rate(self, share: float, lost: float, seconds: float) -> None:
        """Change the rate so that the job loses ``share`` of its speed, and pay back what it lost
        beyond that."""
        per_byte = max(self._cost_s, 1e-9) / max(self._cost_bytes, 1.0)
        aim = AIM * share
        self._excess = min(max(0.0, self._excess + lost - aim * seconds), aim * EXCESS_S)
        wanted = max(LEAST_AIM * aim, aim - self._excess / max(PAID_IN_S, seconds))
        factor = min(FASTER, max(SLOWER, wanted / per_byte / self.rate))
        if factor < 1 or self._read > self.rate * seconds / 2:  # else another limit held it back
            self.rate = max(LEAST, self.rate * factor)


class _Counted:
    """The job's collectives since the beginning, and the longest recent time without one."""

    def __init__(self, collectives: Callable[[], int], now: float) -> None:
        self._collectives = collectives
        self._first = collectives()
        self.began = self._counted = self._last = now
        self.done = 0
        self._gap = 0.0

    def count(self, now: float, at_once: bool = False) -> bool:
        """Count the collectives, unless that was just done; return whether they were counted."""
        if now - self._counted < COUNT_S and not at_once:
            return False
        # When a process ends, its count disappears, and the sum is then lower than before.
        done = max(self.done, self._collectives() - self._first)
        if done > self.done:
            self._gap, self._last = max(now - self._last, self._gap), now
        self.done, self._counted = done, now
        return True

    def gap(self, now: float) -> float:
        """Seconds of the longest gap; the time since the last collective counts as one."""
        return max(self._gap, now - self._last)

    def stands(self, now: float) -> bool:
        """Whether the job has made no collective for longer than one of its steps takes."""
        return now - self._last >= max(STANDS_S, 2 * self._gap)

    def gap_fades(self) -> None:
        """Halve the longest gap, so that an old one loses its weight: a checkpoint is no step."""
        self._gap *= 0.5
