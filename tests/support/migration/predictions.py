# SPDX-License-Identifier: Apache-2.0
"""Predictions of a move, made up for tests."""

from __future__ import annotations

from liveshift.runtime.cost import model as cost
from liveshift.runtime.messages import Prediction, Situation

PAUSE = 60.0


def predicted(gb: float, **other: float) -> Prediction:
    """Of a capsule with so much memory, over a link of 1 GB/s, between hosts of 16 busy cores."""
    given = Situation(
        **(
            {
                "link": 1e9,
                "extra_s": 0.0,
                "reach": 1e9,
                "per_byte": 2e-9,
                "idle": 0.0,
                "fixed_s": 0.4,
                "besides_s": 1.2,
                "cores": 16.0,
            }
            | other
        ),
        size=int(gb * 1e9),
        written=None,
    )
    found = cost.choose(given, PAUSE)
    return Prediction(
        "pre-copy",
        "",
        found.estimate.pause_s,
        [],
        given.size,
        how=found.estimate.way,
        lost_s=found.estimate.lost_s,
        empty_s=found.estimate.empty_s,
        weighed=found.weighed,
        given=given,
    )
