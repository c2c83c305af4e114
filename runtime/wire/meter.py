# SPDX-License-Identifier: Apache-2.0
"""How many bytes a second the lanes carry: by a burst, and by what goes over them anyway."""

from __future__ import annotations

import time
from collections.abc import Generator

from .header import CHUNK

BURST_S = 0.05
FIRST_BURST = 256 << 10
LARGEST_BURST = 64 << 20

LOOK_S = 0.05
"""Of unbroken work until what was acknowledged counts as a rate."""


class Meter:
    """``rate``: bytes a second, 0.0 until one was seen."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: float | None = None
        self._bytes = 0

    def saw(self, size: int, seconds: float) -> None:
        self.rate = size / max(seconds, 1e-6)

    def note(self, acknowledged: int, busy: bool) -> None:
        """``acknowledged``: bytes in all so far. ``busy``: whether chunks queue up before the
        lanes; where they do not, somebody else is slow."""
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
    """The chunks of one burst after the other, each twice the one before, until the next would
    take longer than is left of BURST_S. To be sent: the seconds that the last one took.

    The first one goes twice and counts once: whatever happens for the first time, such as memory
    that comes from the kernel, takes several times as long as the burst itself.
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
