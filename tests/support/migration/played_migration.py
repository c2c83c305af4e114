# SPDX-License-Identifier: Apache-2.0
"""A move of a job, played without a clock: what each way really costs, round by round.

It shares nothing with the model but the meaning of its inputs: pages are written at random places
of a hot set, idle cores are used up by the copy, what they do not suffice for the job loses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from liveshift.runtime.messages import Cores, Writing

COPY = 2.0e9
"""Bytes per second that a copy goes at most, whatever the link."""
FIXED_S, BESIDES_S, TO_BOUNDARY_S = 0.25, 1.2, 0.2
FAULT = 0.1e-9
"""Seconds that a byte costs which is written again after a round: a page is protected."""


@dataclass
class Played:
    """What a move of ``size`` bytes costs, of which ``hot`` are written at ``rate`` bytes a second,
    over a link of ``link`` bytes a second, with ``idle`` idle cores; reading a byte takes ``cpu``
    seconds of a core."""

    size: float
    hot: float
    rate: float
    link: float
    idle: float
    cpu: float = 2.0e-9

    def written(self, seconds: float) -> float:
        """Of random places of the hot set."""
        return self.hot * (1 - math.exp(-self.rate * seconds / self.hot)) if self.hot else 0.0

    def looked_at(self) -> Writing:
        return Writing(self.written(0.2) / 0.2, int(self.written(0.6)), 0.6)

    def cores(self) -> Cores:
        return Cores(2.0, self.idle, self.cpu, "")

    def read(self, left: float, speed: float) -> tuple[float, float]:
        """(seconds that it takes, seconds that the job loses meanwhile). Each second is like the
        others: every byte takes as long, and what idle cores do of it is for nothing."""
        pace = min(speed, self.link, COPY)
        return left / pace, left * max(0.0, self.cpu - self.idle / pace)

    sent = 0.0
    """Bytes, in the rounds of the last :meth:`lost`."""

    def stop(self, left: float) -> float:
        return FIXED_S + left / min(self.link, COPY)

    def lost(self, way: str, speed: float) -> tuple[float, float, float]:
        """(seconds of training lost, of them paused, until the host is empty)."""
        left, slower, copying = self.size, 0.0, 0.0
        self.sent = 0.0
        for number in range({"stop": 0, "round": 1}.get(way, 30)):
            took, lost = self.read(left, speed)
            again = self.written(took + TO_BOUNDARY_S)
            if number and (left - again) / min(self.link, COPY) < lost:
                break
            self.sent += left
            slower, copying, left = slower + lost + FAULT * again, copying + took, again
        pause = self.stop(left)
        return slower + pause, pause, BESIDES_S + copying + pause

    def cheapest(self) -> float:
        """Of all ways and speeds that there are."""
        speeds = [COPY, *(COPY / 2**n for n in range(1, 7)), max(25e6, self.idle / self.cpu)]
        ways = [("stop", COPY), *((way, s) for way in ("round", "rounds") for s in speeds)]
        return min(self.lost(*each)[0] for each in ways)
