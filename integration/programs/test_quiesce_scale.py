# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side of a boundary with more ranks than there are here; messages are
counted here. Its time is for ``make bench-gate``."""

from __future__ import annotations

from gate_bench import scale


def test_messages_grow_no_faster_than_ranks() -> None:
    small, large = scale.run(64), scale.run(2048)  # each raises where an operation is half begun
    assert large["clocks"] > 20 * small["clocks"]
    assert large["messages_per_rank"] <= 1.2 * small["messages_per_rank"]
    assert large["aims_per_host"] < 10
