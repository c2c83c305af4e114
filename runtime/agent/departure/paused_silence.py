# SPDX-License-Identifier: Apache-2.0
"""How long the holder of a snapshot may be silent while the job is paused for it.

A snapshot that fails costs a job less than a pause that lasts because a holder is starved or gone.
But a holder that is slow each time must not end all snapshots. So each one teaches the next.
"""

from __future__ import annotations

from ...wire import CHUNK

PAUSED_SILENCE_S = 1.0
"""While the job is paused for a snapshot, its holder may answer nothing for so many seconds."""

DECAY = 0.8
"""A complete snapshot lowers what was learnt to this share at most: a fast one does not show that
the holder, or a slow link, is always fast."""


class PausedSilence:
    """Of one capsule's snapshots. ``seconds``: for so long the next holder may be silent."""

    def __init__(self) -> None:
        self.seconds = PAUSED_SILENCE_S

    def limit(self, rate: float, lanes: int) -> float:
        """The limit for the next pause. ``rate``: bytes per second over the link, 0.0 if that is
        not known. Over a slow link the first answer takes the time of a chunk on each of the
        ``lanes``, which share it."""
        return self.seconds + (lanes * CHUNK / rate if rate else 0.0)

    def learn(self, longest: float, *, broken: bool, most: float) -> None:
        """A snapshot has ended: ``broken`` by a silence, or complete after silences of ``longest``
        seconds at most. ``most``: the patience of the wire, as nothing waits longer."""
        if broken:
            needed = 2 * self.seconds
        else:
            needed = max(PAUSED_SILENCE_S, 2 * longest, DECAY * self.seconds)
        self.seconds = min(needed, most)
