# SPDX-License-Identifier: Apache-2.0
"""The cost of a move, and a missed deadline, in words for the history and the command line."""

from __future__ import annotations

from ... import units
from ..messages import Cost, Prediction


def in_words(cost: Cost, predicted: Prediction | None = None) -> str:
    """The cost as ``cost 0.9 s of training: paused 0.6, slower 0.3; host empty after 2.4 s``, with
    ``; predicted: 0.8 s of training, empty after 2.2 s`` if the way of the move was predicted."""
    if cost.lost_s is None or cost.paused_s is None or cost.slower_s is None:
        said = f"cost not measured: {cost.why_not}"
    else:
        said = f"cost {cost.lost_s:.1f} s of training"
        said += f": paused {cost.paused_s:.1f}, slower {cost.slower_s:.1f}"
    if cost.empty_s is not None:
        said += f"; host empty after {cost.empty_s:.1f} s"
    if cost.lost_s is None or predicted is None or not predicted.how:
        return said
    expected = f"{predicted.lost_s:.1f} s of training, empty after {predicted.empty_s:.1f} s"
    return f"{said}; predicted: {expected}"


def too_late(needs_s: float, left_s: float) -> str:
    """The warning ``may not be gone in time: it needs up to 4.00 s, and has 2.00 s``."""
    needs, left = units.pause(needs_s), units.pause(max(0.0, left_s))
    return f"may not be gone in time: it needs up to {needs}, and has {left}"
