# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make bench-gate``: what a collective costs, and boundaries of real ranks.
Valgrind counts instructions, which are as many beside other tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_bench import cost, device_cost, quiesce, step_time

pytestmark = pytest.mark.timeout(180)


@pytest.mark.needs("valgrind")
def test_a_collective_on_the_open_gate_costs_few_instructions(tmp_path: Path) -> None:
    programs = cost.build(tmp_path)
    bare = cost.instructions(programs.loop, None, tmp_path)
    hooked = cost.instructions(programs.loop, programs.identified, tmp_path)
    assert bare + 20 < hooked, "the hook was not there"
    assert hooked - bare <= cost.GOAL


@pytest.mark.needs("valgrind")
def test_allocations_and_nccl_collectives_are_measured_on_the_doubles() -> None:
    seen = device_cost.measure(pairs=1, calls=2_000)
    assert 50 < seen["instructions_per_allocation"] < 1_000
    assert 50 < seen["instructions_per_large_allocation"] < 1_000
    assert seen["instructions_per_arena_allocation"] > seen["instructions_per_large_allocation"]
    assert seen["instructions_per_arena_allocation"] < 3_000
    assert 20 < seen["instructions_per_nccl_collective"] <= cost.GOAL + 10, "8 are NCCL's question"


@pytest.mark.alone
@pytest.mark.long
def test_a_step_with_the_library_takes_no_more_instructions() -> None:
    """Not time: other tests run meanwhile. Processes differ by a percent from launch to launch.
    Where the machine does not count instructions, only that the job was seen."""
    seen = step_time.measure(launches=1, turns=25, steps=3)
    assert seen["allreduces_per_step"] >= 4
    ratio = seen["step_instructions_ratio"]
    assert ratio is None or ratio < 1.05


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_real_ranks_come_to_a_boundary(ranks: int) -> None:
    seen = quiesce.run(ranks, boundaries=6)
    assert seen["boundaries"] == 6
    assert seen["beyond_s"] < 0.2
