# SPDX-License-Identifier: Apache-2.0
"""How many cores may be used: as many as there are, or what a cgroup's quota leaves of them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from liveshift.cores import threads, usable

HERE = len(os.sched_getaffinity(0))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """What /proc/self/cgroup says."""
    path = tmp_path / "own"
    path.write_text("4:memory:/elsewhere\n1:cpu:/elsewhere\n0::/a.slice/b.service\n")
    return path


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    top = tmp_path / "cgroup"
    (top / "a.slice" / "b.service").mkdir(parents=True)
    (top / "elsewhere").mkdir()
    (top / "elsewhere" / "cpu.max").write_text("1000 100000\n")
    return top


def test_without_a_quota_it_is_as_many_as_it_may_run_on(own: Path, mounted: Path) -> None:
    assert usable(own, mounted) == HERE
    (mounted / "a.slice" / "b.service" / "cpu.max").write_text("max 100000\n")
    assert usable(own, mounted) == HERE


@pytest.mark.parametrize("place", [".", "a.slice", "a.slice/b.service"])
def test_a_quota_counts_wherever_above_it_is(own: Path, mounted: Path, place: str) -> None:
    (mounted / "a.slice" / "b.service" / "cpu.max").write_text("max 100000\n")
    (mounted / place / "cpu.max").write_text("50000 100000\n")
    assert usable(own, mounted) == 0.5


def test_the_least_of_several_quotas_counts(own: Path, mounted: Path) -> None:
    (mounted / "a.slice" / "cpu.max").write_text("50000 200000\n")
    (mounted / "a.slice" / "b.service" / "cpu.max").write_text("80000 100000\n")
    assert usable(own, mounted) == 0.25


def test_a_quota_of_more_than_there_is_says_nothing(own: Path, mounted: Path) -> None:
    (mounted / "a.slice" / "cpu.max").write_text(f"{(HERE + 1) * 100000} 100000\n")
    assert usable(own, mounted) == HERE


def test_a_container_that_sees_only_its_own_part_has_its_quota_at_the_top(
    own: Path, mounted: Path
) -> None:
    own.write_text("0::/pods/this/one\n")
    (mounted / "cpu.max").write_text("25000 100000\n")
    assert usable(own, mounted) == 0.25


def test_without_cgroup_v2_there_is_none(own: Path, mounted: Path, tmp_path: Path) -> None:
    own.write_text("1:cpu:/elsewhere\n")
    assert usable(own, mounted) == HERE
    assert usable(tmp_path / "nothing", tmp_path / "nowhere") == HERE
    assert 0 < usable() <= HERE


def test_a_thread_for_each_usable_core_up_to_what_is_of_use() -> None:
    assert threads(1) == 1
    assert threads(10**6) == math.ceil(usable())
