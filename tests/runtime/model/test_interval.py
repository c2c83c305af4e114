# SPDX-License-Identifier: Apache-2.0
"""How often a snapshot is worth its cost, against values that were computed by hand."""

from __future__ import annotations

import pytest

from liveshift.runtime.model.interval import (
    SnapshotCost,
    expected_cost,
    interval,
)

HOUR = 3600.0


@pytest.mark.parametrize(
    ("cost", "mttf", "share", "every"),
    [
        # sqrt(2 * 0.5 * 28800) = 169.7; 0.5 s of 169.7 s is 0.3 %.
        (SnapshotCost(0.5), 8 * HOUR, 0.005, 169.706),
        # sqrt(2 * (0.3 + 0.2) * 28800): the slowness counts as the pause does.
        (SnapshotCost(0.3, slowed_s=0.2), 8 * HOUR, 0.005, 169.706),
        # sqrt(2 * 4 * 3600) = 169.7 would cost 2.4 %: 4 s may come every 800 s.
        (SnapshotCost(4.0), HOUR, 0.005, 800.0),
        (SnapshotCost(4.0), HOUR, 0.1, 169.706),
        # sqrt(2 * 0.02 * 3600) = 12, and 0.02 / 0.005 = 4: copying takes 30 s, twice that is 60.
        (SnapshotCost(0.02, takes_s=30.0), HOUR, 0.005, 60.0),
        (SnapshotCost(0.0), HOUR, 0.005, 1.0),
    ],
)
def test_the_interval_is_youngs_within_its_limits(
    cost: SnapshotCost, mttf: float, share: float, every: float
) -> None:
    assert interval(cost, mttf, share, 1.0) == pytest.approx(every, abs=0.001)


def test_no_other_interval_loses_less() -> None:
    def lost(every: float) -> float:
        return 0.5 / every + every / (2 * 8 * HOUR)

    best = interval(SnapshotCost(0.5), 8 * HOUR, 0.5, 1.0)
    assert lost(best) < min(lost(best * 0.9), lost(best * 1.1))
    assert lost(best) == pytest.approx(0.005893, abs=1e-6)


def test_before_the_first_snapshot_the_cost_is_taken_from_the_size() -> None:
    assert expected_cost(500_000_000).lost_s == pytest.approx(1.0)
    assert expected_cost(0).lost_s == 5.0
    assert expected_cost(500_000_000).takes_s == pytest.approx(1.0)
    on_gpus = expected_cost(500_000_000, 12_000_000_000).lost_s
    assert on_gpus == pytest.approx(1.0 + 10.0 + 12.0), "off the GPU and back, and sent"


def test_a_measurement_replaces_the_estimate_and_later_ones_are_smoothed() -> None:
    first = expected_cost(0).after(0.4, 2.0)
    assert (first.pause_s, first.takes_s, first.slowed_s) == (0.4, 2.0, None)
    second = first.after(1.4, 3.0)  # 0.4 + 0.3 * 1.0, 2.0 + 0.3 * 1.0
    assert (second.pause_s, second.takes_s) == pytest.approx((0.7, 2.3))
    assert second.slowed(1.0).lost_s == pytest.approx(1.7), "the first one counts as it is"
    assert second.slowed(1.0).slowed(0.0).lost_s == pytest.approx(0.7 + 0.7)
    cost = first
    for _ in range(20):
        cost = cost.after(0.1, 1.0)
    assert cost.pause_s == pytest.approx(0.1, abs=0.001)
