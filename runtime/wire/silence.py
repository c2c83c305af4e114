# SPDX-License-Identifier: Apache-2.0
"""How long the destination of an image has answered nothing at all, while answers were pending."""

from __future__ import annotations

import time


class Silence:
    """The silence of one destination, on all lanes together: each lane alone may wait for long if
    the link is slow. Threads may call its methods at once.

    ``limit``: seconds after which the silence is too long. ``longest``: the longest one that an
    answer has ended since :meth:`begin`. ``broken``: whether one was too long. A lane leaves out
    the time in which nobody looked for its answers (``since``).
    """

    def __init__(self) -> None:
        self.limit = float("inf")
        self.longest = 0.0
        self.broken = False
        self._heard = 0.0  # monotonic seconds

    def begin(self, limit: float) -> None:
        """Limit the silence from now on: the job is paused."""
        self._heard, self.longest = time.monotonic(), 0.0
        self.limit = limit

    def heard(self, since: float) -> None:
        """An answer has come on a lane that has waited for one ``since`` (monotonic seconds)."""
        self.longest = max(self.longest, self._lasts(since))
        self._heard = time.monotonic()

    def too_long(self, since: float) -> bool:
        """Whether no lane has had an answer for too long. One of them has waited ``since``."""
        if self._lasts(since) > self.limit:
            self.broken = True
            return True
        return False

    def _lasts(self, since: float) -> float:
        return time.monotonic() - max(since, self._heard)
