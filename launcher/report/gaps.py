# SPDX-License-Identifier: Apache-2.0
"""The gap between two steps in which a move happened, and whether the steps bear the move out.

A rank's log says when each step ended. A move says when the job was frozen. The pause that a move
cost is the gap between two steps that holds the freeze, not the longest one nearby: around the time
of a move a step may be slow for other reasons, and a move after the last step has no gap at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

COMMIT, DUMP, UNLOCK = "commit", "dump", "unlock"


class Timed(Protocol):
    """A phase of a migration, in seconds since it began."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def frozen(self) -> bool: ...


def freeze(phases: Iterable[Timed]) -> tuple[float, float] | None:
    """From the first frozen phase to the end of the last one; None: the job was never frozen."""
    frozen = [phase for phase in phases if phase.frozen]
    if not frozen:
        return None
    return min(p.start for p in frozen), max(p.start + p.seconds for p in frozen)


def held_at(phases: Sequence[Timed]) -> float | None:
    """A moment at which no copy of the capsule can have run; None: it was never frozen.

    That is the commit: the source has promised by then, and the destination may not run yet. A
    swap of GPUs inside a host has none; there it is the middle of the freeze.
    """
    if (whole := freeze(phases)) is None:
        return None
    return next((p.start for p in phases if p.name == COMMIT), sum(whole) / 2)


def loose_s(phases: Sequence[Timed]) -> float:
    """Seconds at the ends of a freeze in which a step may still end: until CRIU holds all threads,
    which is so by the end of its dump, and from when the tree is let run (unlock)."""
    if (whole := freeze(phases)) is None:
        return 0.0
    seized = next((p.start + p.seconds for p in phases if p.name == DUMP), whole[0])
    runs = next((p.start for p in reversed(phases) if p.name == UNLOCK), whole[1])
    return seized - whole[0] + whole[1] - runs


def holding(times: Sequence[float], moment: float) -> int | None:
    """Which of the gaps between rising ``times`` holds a moment: the index of its later end."""
    pairs = enumerate(pairwise(times), start=1)
    return next((n for n, (before, after) in pairs if before <= moment <= after), None)


def doubts(
    times: Sequence[float], phases: Sequence[Timed], origin: float, slack: float, least: int = 1
) -> list[str]:
    """Why the ends of a rank's steps do not bear out that it was moved while it trained; empty if
    they do.

    ``origin``: when the move began, on the clock of ``times``. ``slack``: seconds by which the gap
    may be shorter than the freeze, such as :func:`loose_s`. ``least``: how many steps it must have
    made after the freeze.
    """
    whole, moment = freeze(phases), held_at(phases)
    if whole is None or moment is None:
        return ["it was never frozen"]
    found = []
    if not any(time < origin + whole[0] for time in times):
        found.append("it made no step before the freeze")
    after = sum(time > origin + whole[1] for time in times)
    if after < least:
        found.append(f"it made {after} steps after the freeze, {least} are wanted")
    if (n := holding(times, origin + moment)) is None:
        found.append("no gap between two steps holds the freeze")
    elif (gap := times[n] - times[n - 1]) + slack < (frozen := whole[1] - whole[0]):
        found.append(
            f"the gap that holds the freeze is {gap:.3f} s long, the freeze {frozen:.3f} s"
        )
    return found
