# SPDX-License-Identifier: Apache-2.0
"""How many collectives a second a job makes, and how many it usually makes.

A job is looked at with every beat of its agent. What it does usually is no mean of them: it stands
while it begins (some collectives, then a slow first step), at a checkpoint, and where it was just
moved; held against such a mean it would seem to lose nothing to a pre-copy that takes a quarter of
its speed. So the usual rate is that of most of the stretches, each of some steps, it is made of.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import mean, median

BEATS = 120
"""So many are remembered."""

LEAST_S, PARTS = 2.0, 8
"""A stretch is so long at least, and at least such a part of what is remembered."""

GAPS, RECURS = 4, 3
"""And so many times the longest time without collectives that came so often: that of a step. What
came less often is none: the job stood."""

BELOW, ABOVE = 0.4, 0.15
"""So much of the slowest and of the fastest stretches is left out, of the slowest more, as what
disturbs a job makes it slower. The others' mean: one has part of a step too much or too little."""

LEVEL_S = 10.0
"""How far back the beats lie that say how far a job is."""


class UsualRate:
    """Of one job, by what it has counted at moments (seconds) that only grow."""

    def __init__(self) -> None:
        self._beats: deque[tuple[float, int]] = deque(maxlen=BEATS)
        self.now = 0.0
        """Collectives per second between the last two beats."""

    def beat(self, moment: float, collectives: int) -> None:
        """It has made so many until now."""
        if self._beats and moment > self._beats[-1][0]:
            then, before = self._beats[-1]
            self.now = max(0.0, (collectives - before) / (moment - then))
        self._beats.append((moment, collectives))

    def usual(self) -> float:
        """Collectives per second; 0 without any, or before one can say."""
        rates = self._stretches()
        below, above = int(BELOW * len(rates)), int(ABOVE * len(rates))
        return mean(rates[below : len(rates) - above]) if rates else 0.0

    def typical(self) -> float:
        """The same without a lean to either side: the median stretch. :meth:`usual` leaves out more
        of the slow ones, and so is a little above what the job makes over a longer time."""
        rates = self._stretches()
        return median(rates) if rates else 0.0

    def level(self, moment: float) -> float | None:
        """The count at a moment, as if collectives came evenly; None before one can say.

        A count grows in steps, and what is read of it is half a step too little or too much. So
        it is read off a line of the typical rate through the last beats, back to where the job
        stood (at a checkpoint, say): there the line would be broken.
        """
        rate, found = self.typical(), list[float]()
        if not rate:
            return None
        apart = max(1.0, rate * self.gap())
        for then, count in reversed(self._training()):
            at = count + rate * (moment - then)
            if moment - then > LEVEL_S or (found and abs(at - mean(found)) > apart):
                break
            found.append(at)
        return mean(found) if found else None

    def _stretches(self) -> list[float]:
        """The rate of each stretch, rising; none before one can say."""
        beats = self._training()
        span = beats[-1][0] - beats[0][0] if beats else 0.0
        if span < LEAST_S:
            return []
        length = max(LEAST_S, span / PARTS, GAPS * self.gap())
        if length > span / 2:
            return [_rate(beats[0], beats[-1])]
        rates, end = [], 0
        for beat in beats:
            while end < len(beats) and beats[end][0] - beat[0] < length:
                end += 1
            if end == len(beats):
                break
            rates.append(_rate(beat, beats[end]))
        return sorted(rates)

    def gap(self) -> float:
        """The longest time without collectives, in seconds, that came as often as a step's; as
        beats tell: no less than from one to the next. 0 before one can say."""
        beats = self._training()
        if len(beats) < 2:
            return 0.0
        grew = [then for (_, before), (then, now) in pairwise(beats) if now > before]
        gaps = sorted(
            (b - a for a, b in pairwise([beats[0][0], *grew, beats[-1][0]])), reverse=True
        )
        return gaps[min(RECURS, len(gaps)) - 1]

    def _training(self) -> list[tuple[float, int]]:
        # A copy: beats come in another thread than a pre-copy begins in.
        return [(moment, count) for moment, count in tuple(self._beats) if count]


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    return max(0.0, (end[1] - begin[1]) / (end[0] - begin[0]))
