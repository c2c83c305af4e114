# SPDX-License-Identifier: Apache-2.0
"""Finds the gap between two steps in which a move happened, and checks the move against the steps.

A rank's log says when each step ended. A move says when the job was frozen. The pause that a move
cost is the gap between two steps that contains the freeze. It is not the longest gap nearby: around
the time of a move a step may be slow for other reasons, and a move after the last step has no gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.messages import Phase

COMMIT, DUMP, UNLOCK, QUIESCE = "commit", "dump", "unlock", "quiesce"
PACED = "paused after collective"
"""The detail of a boundary (phase quiesce) contains this if the ranks have stopped at a
collective."""


def freeze(phases: Iterable[Phase]) -> tuple[float, float] | None:
    """Return (begin, end) of the freeze: from the first frozen phase to the end of the last one.
    None: the job was never frozen."""
    frozen = [phase for phase in phases if phase.frozen]
    if not frozen:
        return None
    return min(p.start for p in frozen), max(p.start + p.seconds for p in frozen)


def held_at(phases: Sequence[Phase]) -> float | None:
    """Return a moment at which no copy of the capsule can have run; None: it was never frozen.

    That is the commit: the source has promised by then, and the destination may not run yet. A
    swap of GPUs inside a host has no commit; there it is the middle of the freeze.
    """
    if (whole := freeze(phases)) is None:
        return None
    return next((p.start for p in phases if p.name == COMMIT), sum(whole) / 2)


def loose_s(phases: Sequence[Phase], step: float) -> tuple[float, float]:
    """Return how long after the begin of a freeze, and before its end, a step may still end (s).

    At the begin, threads run until CRIU holds them all, which it does by the end of its dump. A
    rank that was frozen in place goes on until then. A rank that has stopped at a collective has
    at most the rest of one step to do, since every step has a collective; ``step`` is the length
    of a whole step in seconds. At the end, steps may end from the moment when the tree is let run
    (phase unlock).
    """
    if (whole := freeze(phases)) is None:
        return 0.0, 0.0
    seized = next((p.start + p.seconds for p in phases if p.name == DUMP), whole[0]) - whole[0]
    if any(p.name == QUIESCE and PACED in p.detail for p in phases):
        seized = min(seized, step)
    runs = next((p.start for p in reversed(phases) if p.name == UNLOCK), whole[1])
    return seized, whole[1] - runs


def holding(times: Sequence[float], moment: float) -> int | None:
    """Return which gap between rising ``times`` contains a moment, as the index of its later end;
    None if no gap does."""
    pairs = enumerate(pairwise(times), start=1)
    return next((n for n, (before, after) in pairs if before <= moment <= after), None)


def doubts(
    times: Sequence[float], phases: Sequence[Phase], origin: float, least: int = 1
) -> list[str]:
    """Return why the ends of a rank's steps do not support that it was moved while it trained;
    empty if they do.

    ``origin``: when the move began, on the clock of ``times``. The gap may be shorter than the
    freeze, as far as :func:`loose_s` says. ``least``: how many steps the rank must have made after
    the freeze.
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
    else:
        gap, frozen = times[n] - times[n - 1], whole[1] - whole[0]
        after_begin, before_end = loose_s(phases, times[n - 1] - times[n - 2] if n > 1 else gap)
        held = times[n - 1] <= origin + whole[0] + after_begin
        held = held and times[n] >= origin + whole[1] - before_end
        if gap < frozen and not held:
            found.append(
                f"the gap that holds the freeze is {gap:.3f} s long, the freeze {frozen:.3f} s"
            )
    return found
