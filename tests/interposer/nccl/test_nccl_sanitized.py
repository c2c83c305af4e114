# SPDX-License-Identifier: Apache-2.0
"""The interposer and the simulated CUDA and NCCL under the sanitizers, while programs are moved at
random moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitizers
from nccl_coordinator import TWO_DEVICES, World


@pytest.fixture(scope="module", params=["address", "thread"])
def sanitized(request: pytest.FixtureRequest) -> World:
    return World(flags=sanitizers.flags(request.param))


@pytest.mark.parametrize(
    ("name", "steps", "begun"),
    [
        ("train", "60", "step 1"),
        pytest.param("creations", "80", "made", marks=pytest.mark.long),
    ],
)
def test_nothing_is_found(
    sanitized: World, tmp_path: Path, name: str, steps: str, begun: str
) -> None:
    with sanitized.ranks(name, 2, tmp_path / "run", steps, SIMCUDA_DEVICES=TWO_DEVICES) as ranks:
        ranks.await_line(begun, 60)
        ranks.move(limit_s=20)
        ranks.move_until_the_end(1, limit_s=20)
        ranks.finish()  # a finding is an exit status of its own
        assert not [line for rank in range(2) for line in ranks.said(rank) if "Sanitizer" in line]
