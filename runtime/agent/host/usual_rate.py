# SPDX-License-Identifier: Apache-2.0
"""How many collectives per second a job makes now, and how many it usually makes.

The agent counts the collectives at each heartbeat. A plain mean would not give the usual rate: the
job makes none while it begins (some collectives, then a slow first step), at a checkpoint, and
after a move. Compared with such a mean, a job would seem to lose nothing to a pre-copy that takes a
quarter of its speed. So the heartbeats are divided into stretches of some steps, and most of these
give the rate.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import mean, median

HEARTBEATS = 120
"""The agent remembers this many heartbeats of a job."""

LEAST_S, PARTS = 2.0, 8
"""A stretch is at least ``LEAST_S`` seconds, and at least 1/``PARTS`` of the remembered time."""

GAPS, RECURS = 4, 3
"""A stretch is at least ``GAPS`` times the longest gap between collectives that came ``RECURS``
times: the gap of a step. In a gap that came less often the job made no steps."""

BELOW, ABOVE = 0.4, 0.15
"""Trimmed mean: it drops the slowest 40 % and the fastest 15 % of the stretches. It drops more slow
ones because disturbances slow a job down. A mean, because a stretch may cut a step in parts."""

LEVEL_S = 10.0
"""Only heartbeats of the last LEVEL_S seconds show how far a job is."""


class UsualRate:
    """The rate of one job, from its counts at moments (seconds) that only grow."""

    def __init__(self) -> None:
        self._heartbeats: deque[tuple[float, int]] = deque(maxlen=HEARTBEATS)
        self.now = 0.0
        """Collectives per second between the last two heartbeats."""

    def heartbeat(self, moment: float, collectives: int) -> None:
        """Record that the job had made ``collectives`` in all at ``moment``."""
        if self._heartbeats and moment > self._heartbeats[-1][0]:
            then, before = self._heartbeats[-1]
            self.now = max(0.0, (collectives - before) / (moment - then))
        self._heartbeats.append((moment, collectives))

    def usual(self) -> float:
        """Collectives per second; 0 if the job makes none, or if there are too few heartbeats."""
        rates = self._stretches()
        below, above = int(BELOW * len(rates)), int(ABOVE * len(rates))
        return mean(rates[below : len(rates) - above]) if rates else 0.0

    def typical(self) -> float:
        """The median stretch in collectives per second, which leans to neither side. :meth:`usual`
        drops more slow stretches, so it is a little above the rate over a longer time."""
        rates = self._stretches()
        return median(rates) if rates else 0.0

    def level(self, moment: float) -> float | None:
        """The count at a moment, as if collectives came evenly; None if there are too few
        heartbeats.

        A count grows in steps, so a single read may be half a step too low or too high. The level
        is therefore read off a line with the typical rate through the last heartbeats. The line
        goes back to where the job last paused, at a checkpoint for example: a pause breaks the
        line.
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
        """The rates of all stretches in rising order; empty if there are too few heartbeats."""
        heartbeats = self._training()
        span = heartbeats[-1][0] - heartbeats[0][0] if heartbeats else 0.0
        if span < LEAST_S:
            return []
        length = max(LEAST_S, span / PARTS, GAPS * self.gap())
        if length > span / 2:
            return [_rate(heartbeats[0], heartbeats[-1])]
        rates, end = [], 0
        for heartbeat in heartbeats:
            while end < len(heartbeats) and heartbeats[end][0] - heartbeat[0] < length:
                end += 1
            if end == len(heartbeats):
                break
            rates.append(_rate(heartbeat, heartbeats[end]))
        return sorted(rates)

    def gap(self) -> float:
        """Seconds: the longest gap between collectives that recurs like that of a step. The
        heartbeats limit it: it is at least the time between two of them. 0 if there are too few."""
        heartbeats = self._training()
        if len(heartbeats) < 2:
            return 0.0
        grew = [then for (_, before), (then, now) in pairwise(heartbeats) if now > before]
        gaps = sorted(
            (b - a for a, b in pairwise([heartbeats[0][0], *grew, heartbeats[-1][0]])), reverse=True
        )
        return gaps[min(RECURS, len(gaps)) - 1]

    def _training(self) -> list[tuple[float, int]]:
        # A copy: heartbeats come in one thread, and a pre-copy begins in another.
        return [(moment, count) for moment, count in tuple(self._heartbeats) if count]


def _rate(begin: tuple[float, int], end: tuple[float, int]) -> float:
    return max(0.0, (end[1] - begin[1]) / (end[0] - begin[0]))
