# SPDX-License-Identifier: Apache-2.0
"""Measures how many bytes per second the lanes carry: by a burst, and by their normal traffic."""

from __future__ import annotations

import time
from collections.abc import Generator

from .header import CHUNK

BURST_S = 0.05
FIRST_BURST = 256 << 10
LARGEST_BURST = 64 << 20

LOOK_S = 0.05
"""After this many seconds of unbroken work the meter takes the acknowledged bytes as a rate."""


class Meter:
    """The measured rate of the lanes. ``rate``: bytes per second, 0.0 until one was measured."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: float | None = None
        self._bytes = 0

    def saw(self, size: int, seconds: float) -> None:
        self.rate = size / max(seconds, 1e-6)

    def note(self, acknowledged: int, busy: bool) -> None:
        """Take a look at the traffic.

        ``acknowledged``: all bytes acknowledged so far. ``busy``: whether chunks queue up before
        the lanes. If they do not, the lanes are not the bottleneck, and the look does not count.
        """
        now = time.monotonic()
        if not busy:
            self._since = None
        elif self._since is None:
            self._since, self._bytes = now, acknowledged
        elif now - self._since >= LOOK_S:
            seen = (acknowledged - self._bytes) / (now - self._since)
            self.rate = (self.rate + seen) / 2 if self.rate else seen
            self._since, self._bytes = now, acknowledged


def burst_sizes(lanes: int) -> Generator[list[int], float, None]:
    """Yield the chunk sizes of one burst after the other; each burst is twice the one before.

    The caller sends back the seconds that the last burst took. The generator ends when the next
    burst would take longer than what is left of BURST_S. The first burst is sent twice and counts
    once: first-time costs, such as fresh memory from the kernel, take several times as long.
    """
    left, size = BURST_S, FIRST_BURST
    yield [size // lanes] * lanes
    while True:
        chunk = min(CHUNK, size // lanes)
        took = yield [chunk] * (size // chunk)
        left -= took
        size *= 2
        if 2 * took > left or size > LARGEST_BURST:
            return
