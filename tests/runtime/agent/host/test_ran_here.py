# SPDX-License-Identifier: Apache-2.0
"""What a host remembers of the capsules that ran there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.runtime.agent.host import ran_here


@pytest.fixture
def factory(tmp_path: Path) -> Any:
    paths = SimpleNamespace(state=tmp_path / "state")
    placement = Placement((), (str(tmp_path / "scratch"),))
    return SimpleNamespace(cluster=SimpleNamespace(paths=paths), placement=placement)


def test_the_last_epoch_counts(factory: Any) -> None:
    assert ran_here.last_epoch(factory, "gpt/1") == 0
    ran_here.remember(factory, "gpt/1", 3)
    ran_here.remember(factory, "gpt/1", 12)
    assert ran_here.last_epoch(factory, "gpt/1") == 12
    assert ran_here.last_epoch(factory, "gpt/0") == 0


def test_it_does_not_count_if_a_carried_path_is_another_directory_by_now(
    factory: Any, tmp_path: Path
) -> None:
    """Such as that of a disk that is empty after a boot."""
    scratch = tmp_path / "scratch"
    ran_here.remember(factory, "gpt/0", 3)
    scratch.mkdir()  # the job has made it since
    assert ran_here.last_epoch(factory, "gpt/0") == 3
    ran_here.remember(factory, "gpt/0", 3)
    (scratch / "log").touch()
    assert ran_here.last_epoch(factory, "gpt/0") == 3
    scratch.rename(tmp_path / "old")
    assert ran_here.last_epoch(factory, "gpt/0") == 0
    scratch.mkdir()
    assert ran_here.last_epoch(factory, "gpt/0") == 0
    factory.placement = Placement((), (str(tmp_path / "old"), str(tmp_path / "other")))
    assert ran_here.last_epoch(factory, "gpt/0") == 0, "another path is carried since"


def test_it_is_forgotten_with_its_job(factory: Any) -> None:
    names = ("gpt/1", "gpt.x/1", "bert/0")
    for name in names:
        ran_here.remember(factory, name, 3)
    ran_here.forget_job(factory, "bert")
    assert [ran_here.last_epoch(factory, name) for name in names] == [3, 3, 0]
    ran_here.forget_unknown(factory, {"gpt"})
    assert [ran_here.last_epoch(factory, name) for name in names] == [3, 0, 0]


def test_a_state_that_cannot_be_written_or_read_is_as_none(factory: Any) -> None:
    factory.cluster.paths.state.write_text("in the way")
    ran_here.remember(factory, "gpt/1", 3)  # the capsule runs all the same
    factory.cluster.paths.state.unlink()
    ran_here.remember(factory, "gpt/1", 3)
    (factory.cluster.paths.state / "ran-here/gpt.1").write_text("")
    assert ran_here.last_epoch(factory, "gpt/1") == 0
