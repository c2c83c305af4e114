# SPDX-License-Identifier: Apache-2.0
"""How fast memory is read while its job trains, and what that costs the job.

The job says by itself how fast it is: its collectives per second, before the pre-copy and in it.
Without a cap (``precopy.slow_down``) memory is read at the speed that was chosen (cost/model.py),
and what a byte costs the job is only measured. With a cap the job keeps that much of its speed.

What a byte costs it (a core that reads, one that encrypts, memory bandwidth, a fault for the first
write to every page that was read) depends on machine and job; so the bytes per second are turned
until the job loses what it may. A look at it is a few steps long and noisy: several together tell
what a byte costs, one alone makes the rate little higher, and what was lost too much is owed.

Until it has said so, only what reading costs this agent is known: so many bytes per second are read
that it takes half of what may be lost of all cores' time. How far a job without collectives is held
up the kernel tells (run_time.py); as it may lose more than that, no more is read even then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....cores import usable
from ..host.reading_cost import BYTES_PER_CPU_SECOND, OF_THIS_AGENT, ReadingCost

LEAST, UNSEEN_MOST = 25e6, 2e9
"""Bytes per second. At least: a pre-copy that never ends helps nobody. And at most as long as the
job does not say what it loses: memory bandwidth is no CPU time."""

AIM = 0.75
"""Of what may be lost: then the noise of a look stays within it."""

FADES = 0.7
"""What the looks before say of a byte's cost counts so much less with each."""

SLOWER, FASTER = 0.25, 1.5
"""The factors of the rate, at least and at most, after a look."""

PAID_IN_S, DEBT_S = 10.0, 20.0
"""What the job has lost beyond the aim is to be paid back in so many seconds (or looks, where they
are longer than one); it is no more than the aim of so many: a checkpoint is not our doing."""

LEAST_AIM = 0.25
"""Of the aim, while there is a debt."""

LOOK_S, LOOK_COLLECTIVES, LOOK_GAPS = 0.5, 20, 4
"""A look at the job takes so long at least, is so many collectives long, and so many times the
longest time in which there was none: of a job that makes all of its own at the end of a step, a
shorter one would see next to nothing or too much."""

BEHIND_GAPS = 2
"""Or until it is so many of these behind its usual speed, where one has been seen: a job that is
held up has long ones, and would be looked at the later the more it is."""

STANDS_S = 30.0
"""After so long without any the job may be standing because of us; it is looked at in any case."""

COUNT_S = 0.1
"""Between two countings of collectives."""

BURST_S = 0.1
"""Who has read too little for a while may make up for so much of it."""

NAP_S = 0.25
"""The longest sleep in one piece."""


class Pace:
    """``spent`` is called after each batch that was read, by each thread that reads; it sleeps as
    long as is due.

    ``collectives`` counts those of the job's that have finished; ``usual`` is their number per
    second before (0: it is not known, or the job makes none), of which ``share`` may be lost, None
    for no cap. It is
    mended for a job that turns out to be faster: it was looked at while it began. ``gap``: the
    longest time without any between two steps, in seconds; 0: not known.
    """

    def __init__(
        self, collectives: Callable[[], int], usual: float, share: float | None,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
        cpus: float | None = None, cost: ReadingCost = OF_THIS_AGENT, gap: float = 0.0,
        sees_all: bool = True,
    ) -> None:  # fmt: skip
        """``sees_all``: whether the job loses no more than ``collectives`` tells."""
        self._usual = usual
        self._sees_all = sees_all
        self._share = share
        self.limit = float("inf")
        """Bytes per second, as the way that was chosen limits them."""
        self.least: Callable[[], float] = lambda: 0.0
        """Bytes per second that a deadline needs: neither cap nor limit goes below it."""
        self._clock, self._sleep = clock, sleep
        # Where all cores are the job's, it loses the share of them that is used up. The other half
        # is for what nobody foresees: faults, bandwidth, hosts that share a machine.
        self._budget = (share or 0.0) / 2 * (cpus or usable())  # CPU seconds a second
        self._cost = cost
        self.rate = self._affordable()
        """Bytes per second that may be read."""
        self.slow_down: float | None = None
        """The share of the job's speed that was lost at the last look; below 0: it was faster."""
        self._turn = threading.Lock()
        self._collectives = collectives
        self._job: _Counted | None = None  # from the first batch on
        self._looked = self._due = clock()
        self._seen = 0  # collectives, at the last look
        self._read = 0  # bytes since then
        # What the job has lost, to so many bytes, and in so many seconds: they fade.
        self._cost_s = self._cost_bytes = self._cost_of_s = 0.0
        self._debt = 0.0  # seconds
        self._gap = gap

    def spent(self, read: int) -> None:
        """So many bytes were read; sleeps until the next may be."""
        with self._turn:
            now = self._clock()
            self._read += read
            readers = self._cost.count(id(self), read, now)
            if self.slow_down is None:
                self.rate = self._affordable(readers)
            if self._usual and self._job is None:
                self._job, self._looked = _Counted(self._collectives, now), now
            if self._job is not None and self._job.count(now) and self._is_time(self._job, now):
                self._look(self._job, now)
            if not self._sees_all:
                self.rate = min(self.rate, self._affordable(readers))
            rate = max(min(self.rate, self.limit), self.least())
            self._due = max(self._due, now - BURST_S) + read / rate
            due = self._due - now
        while due > 0:
            self._sleep(min(due, NAP_S))
            due -= NAP_S

    @property
    def per_byte(self) -> float | None:
        """Seconds that the job was seen to lose for each byte read; None: not known."""
        return self._cost_s / self._cost_bytes if self._cost_bytes else None

    def lost(self) -> float | None:
        """The share of the job's speed that was lost since the beginning; None: not known."""
        if self._job is None:
            return None
        now = self._clock()
        seconds = now - self._job.began
        if seconds < LOOK_S:
            return None
        self._job.count(now, at_once=True)
        return max(0.0, 1 - self._job.done / seconds / self._usual)

    def _affordable(self, readers: int = 1) -> float:
        """Bytes per second; with several readers each has its part of the cores' time."""
        if self._share is None:
            return float("inf")
        per_byte = self._cost.per_byte
        if self._usual and self._sees_all:  # before it says so, no more is tried out on it
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

    def _look(self, job: _Counted, now: float) -> None:
        seconds = now - self._looked
        self.slow_down = 1 - (job.done - self._seen) / seconds / self._usual
        lost = self.slow_down * seconds
        self._cost_s = self._cost_s * FADES + lost
        self._cost_bytes = self._cost_bytes * FADES + self._read
        self._cost_of_s = self._cost_of_s * FADES + seconds
        if self._cost_s < 0:  # reading makes none faster: its usual speed is more than was seen
            self._usual *= 1 - self._cost_s / self._cost_of_s
            self._cost_s = 0.0
        if self._share is not None:
            self._turn_rate(self._share, lost, seconds)
        self._looked, self._seen, self._read = now, job.done, 0
        self._gap = job.gap(now)
        job.gap_fades()

    def _turn_rate(self, share: float, lost: float, seconds: float) -> None:
        """Turn the rate so that the job loses ``share`` of its speed; what it has lost beyond that
        it gets back."""
        per_byte = max(self._cost_s, 1e-9) / max(self._cost_bytes, 1.0)
        aim = AIM * share
        self._debt = min(max(0.0, self._debt + lost - aim * seconds), aim * DEBT_S)
        wanted = max(LEAST_AIM * aim, aim - self._debt / max(PAID_IN_S, seconds))
        factor = min(FASTER, max(SLOWER, wanted / per_byte / self.rate))
        if factor < 1 or self._read > self.rate * seconds / 2:  # else something else bounds it
            self.rate = max(LEAST, self.rate * factor)


class _Counted:
    """The job's collectives since the beginning, and the longest time lately without one."""

    def __init__(self, collectives: Callable[[], int], now: float) -> None:
        self._collectives = collectives
        self._first = collectives()
        self.began = self._counted = self._last = now
        self.done = 0
        self._gap = 0.0

    def count(self, now: float, at_once: bool = False) -> bool:
        """Count them, unless that was just done; whether it was done now."""
        if now - self._counted < COUNT_S and not at_once:
            return False
        # A process that ends takes its count along, and the job then has fewer than before.
        done = max(self.done, self._collectives() - self._first)
        if done > self.done:
            self._gap, self._last = max(now - self._last, self._gap), now
        self.done, self._counted = done, now
        return True

    def gap(self, now: float) -> float:
        """Seconds; the time since the last one counts."""
        return max(self._gap, now - self._last)

    def stands(self, now: float) -> bool:
        """Whether it has made none for longer than a step of its would take."""
        return now - self._last >= max(STANDS_S, 2 * self._gap)

    def gap_fades(self) -> None:
        """An old long one counts less and less: a checkpoint is no step."""
        self._gap *= 0.5
