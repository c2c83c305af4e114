# SPDX-License-Identifier: Apache-2.0
"""How fast memory may be read while its job trains: such that the job keeps most of its speed.

The job says by itself how fast it is: its collectives per second, before the pre-copy and in it.
What a byte costs it (a core that reads, one that encrypts, memory bandwidth, a fault for the first
write to every page that was read) depends on machine and job; so the bytes per second are turned
until the job loses what it may. Of a job without collectives nothing is known, and they stay what
they were at first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

BYTES_PER_CPU_SECOND = 1e9
"""About what a core reads, compares, encrypts and sends; see docs/measurements.md."""

LEAST = 25e6
"""Bytes per second, at least: a pre-copy that never ends helps nobody."""

AIM = 0.75
"""Of what may be lost: then the noise of a look stays within it."""

LOOK_COLLECTIVES, LOOK_LEAST_S, LOOK_MOST_S = 20, 0.5, 10.0
"""A look at the job takes so many collectives, within these seconds: with fewer the rate of a job
that makes a few per step is that of the moment."""

BURST_S = 0.1
"""Who has read too little for a while may make up for so much of it."""

NAP_S = 0.25
"""The longest sleep in one piece."""


class Pace:
    """``spent`` is called after each batch that was read, by each thread that reads; it sleeps as
    long as is due.

    ``collectives`` counts those of the job's that have finished; ``usual`` is their number per
    second before (0: it is not known, or the job makes none); ``share`` of it may be lost.
    """

    def __init__(
        self, collectives: Callable[[], int], usual: float, share: float,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
        cpus: int | None = None,
    ) -> None:  # fmt: skip
        self._collectives = collectives
        self._usual = usual
        self._share = share
        self._clock, self._sleep = clock, sleep
        # Where all cores are the job's, it loses the share of them that is used up. The other half
        # is for what nobody foresees: faults, bandwidth, hosts that share a machine.
        cpus = cpus or len(os.sched_getaffinity(0))
        self.first = max(LEAST, share / 2 * cpus * BYTES_PER_CPU_SECOND)
        self.rate = self.first
        """Bytes per second that may be read."""
        self.slow_down: float | None = None
        """The share of the job's speed that was lost when it was looked at last."""
        self._turn = threading.Lock()
        self._looked = self._began = self._due = clock()
        self._seen = self._first_seen = collectives() if usual else 0
        self._read = 0  # since it was looked at

    def spent(self, read: int) -> None:
        """So many bytes were read; sleeps until the next may be."""
        with self._turn:
            now = self._clock()
            self._read += read
            if self._usual and self._is_time(now):
                self._look(now)
            self._due = max(self._due, now - BURST_S) + read / self.rate
            due = self._due - now
        while due > 0:
            self._sleep(min(due, NAP_S))
            due -= NAP_S

    def lost(self) -> float | None:
        """The share of the job's speed that was lost since the beginning; None: not known."""
        seconds = self._clock() - self._began
        if not self._usual or seconds < LOOK_LEAST_S:
            return None
        return self._lost(self._first_seen, seconds)

    def _lost(self, before: int, seconds: float) -> float:
        # A process that ends takes its count along, and the job then has fewer than before.
        done = max(0, self._collectives() - before)
        return max(0.0, 1 - done / seconds / self._usual)

    def _is_time(self, now: float) -> bool:
        since = now - self._looked
        enough = since * self._usual >= LOOK_COLLECTIVES
        return since >= LOOK_MOST_S or (enough and since >= LOOK_LEAST_S)

    def _look(self, now: float) -> None:
        seconds = now - self._looked
        lost = self._lost(self._seen, seconds)
        # One look is noisy; two are less so.
        mean = lost if self.slow_down is None else (lost + self.slow_down) / 2
        factor = min(2.0, max(0.25, AIM * self._share / max(mean, 1e-9)))
        if factor < 1 or self._read > self.rate * seconds / 2:  # else something else bounds it
            self.rate = max(LEAST, self.rate * factor)
        self.slow_down = lost
        self._looked, self._seen, self._read = now, self._collectives(), 0
