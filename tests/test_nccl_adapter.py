# SPDX-License-Identifier: Apache-2.0
"""NCCL's functions under the interposer, on the simulated CUDA and NCCL: counted, gated, torn down
and rebuilt beneath programs that know nothing of it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from nccl_coordinator import Abandoned, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("doubles"))


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What train prints at its end without the interposer."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with world.ranks("train", 3, folder / "run", "80", preload=False) as ranks:
        return ranks.finish()


def test_calls_are_counted(world: World, tmp_path: Path, undisturbed: list[str]) -> None:
    with world.ranks("train", 3, tmp_path / "run", "80") as ranks:
        assert ranks.finish() == undisturbed
        for rank in range(3):
            seen = ranks.page(rank)
    # the pages outlive their processes
    from liveshift.interposer import page

    for rank in range(3):
        seen = page.read(tmp_path / "run" / "pages" / str(ranks.processes[rank].pid))
        assert seen.started == seen.finished
        assert seen.begun["nccl.AllReduce"] == 80 + 240 + (4 if rank else 2)
        assert seen.begun["nccl.Send"] == 80 + (80 if rank < 2 else 0)
        assert seen.begun["nccl.CommInit"] == 2
        assert seen.begun["nccl.CommSplit"] == 5


def test_moved_again_and_again_with_the_same_result(
    world: World, tmp_path: Path, undisturbed: list[str]
) -> None:
    chance = random.Random(7)
    moved = abandoned = 0
    with world.ranks("train", 3, tmp_path / "run", "80") as ranks:
        ranks.await_line("step 1")
        while ranks.running:
            time.sleep(chance.random() * 0.1)
            try:
                ranks.move(limit_s=3)
                moved += 1
            except Abandoned:
                abandoned += 1
        assert ranks.finish() == undisturbed
    print(moved, abandoned)
    assert moved >= 3
