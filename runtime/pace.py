# SPDX-License-Identifier: Apache-2.0
"""How fast memory may be read while its job trains: such that the job keeps most of its speed.

The job says by itself how fast it is: its collectives per second, before the pre-copy and in it.
Reading takes memory bandwidth, a core, and a fault for the first write to every page that was read;
the share of the time in which we read is what can be turned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LEAST_DUTY = 0.02
"""The share of the time in which is read at least: a pre-copy that never ends helps nobody."""

LOOK_COLLECTIVES, LOOK_LEAST_S, LOOK_MOST_S = 20, 0.5, 10.0
"""A look at the rate takes so many collectives, within these seconds: with fewer the rate of a job
that makes a few per step is that of the moment."""

NAP_S, DUE_MOST_S = 0.25, 2.0
"""The longest sleep in one piece, and for one batch: then it is time to look again."""


class Pace:
    """``spent`` is called after each batch that was read, by each thread that reads; it sleeps as
    long as is due.

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
        # Reading may take a job's only core, and what becomes of the bytes takes others: before it
        # is known what that costs, it is no more than the share that may be lost.
        self.duty = max(LEAST_DUTY, share / 2 if usual else share)
        self.slow_down: float | None = None
        """The share of the job's speed that was lost when it was looked at last."""
        self._looked = self._began = clock()
        self._here = threading.local()  # when this thread was let go on
        self._turn = threading.Lock()
        self._seen = self._first = collectives() if usual else 0

    def spent(self, _bytes: int) -> None:
        """What went since the last call was work; sleeps in proportion."""
        now = self._clock()
        busy = now - getattr(self._here, "resumed", self._began)
        with self._turn:
            if self._usual and self._is_time(now):
                self._look(now)
        due = min(busy * (1 / self.duty - 1), DUE_MOST_S)
        while due > 0:
            self._sleep(min(due, NAP_S))
            due -= NAP_S
        self._here.resumed = self._clock()

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
            self.duty = max(LEAST_DUTY, self.duty * max(0.25, 0.8 * self._share / self.slow_down))
        elif self.slow_down < 0.5 * self._share:
            self.duty = min(1.0, self.duty * 1.5)
