# SPDX-License-Identifier: Apache-2.0
"""How fast memory may be read while its job trains: such that the job keeps most of its speed.

The job says by itself how fast it is: its collectives per second, before the pre-copy and in it.
Reading takes memory bandwidth, a core, and a fault for the first write to every page that was read;
the share of the time in which each thread reads is what can be turned.

Of a job without collectives nothing is known. Then each thread reads for no larger share of the
time than may be lost: that is the most of a core that reading takes off a thread of the job, even
where all cores are busy. Faults, memory bandwidth and what encrypts and sends come on top of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_DUTY, LEAST_DUTY = 0.5, 0.02
"""The share of the time in which a thread reads: until it is known what that costs, where that can
be known at all, and at least, since a pre-copy that never ends helps nobody."""

LOOK_COLLECTIVES, LOOK_LEAST_S, LOOK_MOST_S = 20, 0.5, 10.0
"""A look at the rate takes so many collectives, within these seconds: with fewer the rate of a job
that makes a few per step is that of the moment."""

NAP_S = 0.25
"""The longest sleep in one piece."""


class Pace:
    """``spent`` is called after each batch that was read, by the thread that has read it; it sleeps
    as long as is due. ``begin`` is called before a round.

    ``collectives`` counts those of the job's that have finished; ``usual`` is their number per
    second before (0: it is not known, or the job makes none); ``share`` of it may be lost.
    """

    def __init__(
        self, collectives: Callable[[], int], usual: float, share: float,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._collectives = collectives
        self._usual = usual
        self._share = share
        self._clock, self._sleep = clock, sleep
        self.duty = FIRST_DUTY if usual else min(FIRST_DUTY, share)
        self.slow_down: float | None = None
        """The share of the job's speed that was lost when it was looked at last."""
        self._round = self._looked = self._began = clock()
        self._own = threading.local()  # when this thread went on
        self._seen = self._first = collectives() if usual else 0

    def begin(self) -> None:
        """What went until now was no work: nobody has read between two rounds."""
        self._round = self._clock()

    def spent(self, _bytes: int) -> None:
        """What went since this thread's last call was work; sleeps in proportion."""
        now = self._clock()
        busy = now - max(self._round, getattr(self._own, "resumed", self._round))
        if self._usual and self._is_time(now):
            self._look(now)
        self._sleep(min(busy * (1 / self.duty - 1), NAP_S))
        self._own.resumed = self._clock()

    def lost(self) -> float | None:
        """The share of the job's speed that was lost since the beginning; None: not known."""
        seconds = self._clock() - self._began
        if not self._usual or seconds < LOOK_LEAST_S:
            return None
        return max(0.0, 1 - (self._collectives() - self._first) / seconds / self._usual)

    def _is_time(self, now: float) -> bool:
        since = now - self._looked
        enough = since * self._usual >= LOOK_COLLECTIVES
        return since >= LOOK_MOST_S or (enough and since >= LOOK_LEAST_S)

    def _look(self, now: float) -> None:
        count = self._collectives()
        rate = (count - self._seen) / (now - self._looked)
        self._looked, self._seen = now, count
        self.slow_down = max(0.0, 1 - rate / self._usual)
        if self.slow_down > self._share:
            self.duty = max(LEAST_DUTY, self.duty * max(0.5, self._share / self.slow_down))
        elif self.slow_down < 0.75 * self._share:
            self.duty = min(1.0, self.duty * 1.25)
