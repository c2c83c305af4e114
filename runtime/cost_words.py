# SPDX-License-Identifier: Apache-2.0
"""What a move cost, in words: for the history and for the command line."""

from __future__ import annotations

from .messages import Cost


def in_words(cost: Cost) -> str:
    """``cost 0.9 s of training: paused 0.6, slower 0.3; host empty after 2.4 s``."""
    if cost.lost_s is None or cost.paused_s is None or cost.slower_s is None:
        said = f"cost not measured: {cost.why_not}"
    else:
        said = f"cost {cost.lost_s:.1f} s of training"
        said += f": paused {cost.paused_s:.1f}, slower {cost.slower_s:.1f}"
    return said + (f"; host empty after {cost.empty_s:.1f} s" if cost.empty_s is not None else "")
