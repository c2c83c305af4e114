# SPDX-License-Identifier: Apache-2.0
"""How often a snapshot of a job is worth its cost: the arithmetic of ``snapshots.every = "auto"``.

A snapshot costs the job C seconds of training. A failure comes every M seconds on average, and
repeats half an interval of training (failures.py has M). With an interval of T seconds the job
loses the share

    C / T + T / (2 M)

of its time, which is least for T = sqrt(2 C M). This is Young's interval (J. W. Young, "A first
order approximation to the optimum checkpoint interval", CACM 17(9), 1974). Daly's higher-order
estimate (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22(3), 2006) adds terms in C / M. For a snapshot of less than a second and a failure
every few hours they change T by less than a per cent, so they are left out.

Two things make the interval longer. The snapshots may not cost more than a share of the job's
speed that the cluster file sets. And each must be complete before the next one begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SMOOTHING = 0.3
"""The weight of the newest measurement. One that is far off changes the interval, which goes with
the square root, by little."""

ROOM = 2.0
"""An interval is at least so many times what a snapshot takes until it is complete."""

BEFORE_S = 0.5
BYTES_PER_S = 1e9
UNKNOWN_S = 5.0
"""Before the first snapshot: each is taken to pause the job for BEFORE_S seconds, and for as long
as the largest image takes at BYTES_PER_S; UNKNOWN_S seconds if no size is known. That is more than
what is measured, since most memory goes ahead while the job trains."""

DEVICE_BYTES_PER_S = 1.2e9
"""The driver takes device memory off a GPU and puts it back at this rate, both together: 10 GiB in
6.0 s and 2.4 s on an H100 (docs/gpu.md). None of it goes ahead."""


@dataclass(frozen=True)
class SnapshotCost:
    """What one snapshot of a job costs; seconds, smoothed over those that were taken.

    ``pause_s``: the job is paused. ``slowed_s``: what it loses besides, as copying takes cores
    from it; None if that was not measured. ``takes_s``: from the beginning until it is complete.
    """

    pause_s: float
    slowed_s: float | None = None
    takes_s: float = 0.0
    measured: bool = False

    @property
    def lost_s(self) -> float:
        return self.pause_s + (self.slowed_s or 0.0)

    def after(self, pause_s: float, takes_s: float) -> SnapshotCost:
        """The cost once a further snapshot was measured; the first one replaces the estimate."""
        if not self.measured:
            return SnapshotCost(pause_s, None, takes_s, measured=True)
        return replace(
            self, pause_s=_smooth(self.pause_s, pause_s), takes_s=_smooth(self.takes_s, takes_s)
        )

    def slowed(self, seconds: float) -> SnapshotCost:
        """The cost once it was measured how much a snapshot has slowed the job down."""
        before = seconds if self.slowed_s is None else self.slowed_s
        return replace(self, slowed_s=_smooth(before, seconds))


def _smooth(before: float, now: float) -> float:
    return before + SMOOTHING * (now - before)


def expected_cost(largest: int, devices: int = 0) -> SnapshotCost:
    """The cost of a job's first snapshot, on the safe side. ``largest``: bytes of memory of its
    largest capsule, 0 if that is not known; ``devices``: the most that one has on GPUs."""
    seconds = BEFORE_S + largest / BYTES_PER_S if largest else UNKNOWN_S
    seconds += devices / BYTES_PER_S + devices / DEVICE_BYTES_PER_S
    return SnapshotCost(seconds, takes_s=seconds)


def interval(cost: SnapshotCost, mttf_s: float, share: float, least_s: float) -> float:
    """Seconds between two snapshots. They take at most ``share`` of the job's speed, and come at
    least ``least_s`` seconds apart."""
    best = math.sqrt(2 * cost.lost_s * mttf_s)
    return max(best, cost.lost_s / share, ROOM * cost.takes_s, least_s)
