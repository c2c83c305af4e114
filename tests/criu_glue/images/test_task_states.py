# SPDX-License-Identifier: Apache-2.0
"""A process that was stopped for its move goes on after it; others stay as they were."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from checkout import ROOT
from image_edits import change_first

from liveshift.criu_glue.images import task_states
from liveshift.errors import StepFailed

SEEDS = ROOT / "tests" / "fuzz" / "seeds"
STATE = (3, 1)
ALIVE, DEAD, STOPPED = 1, 2, 3


@pytest.fixture
def images(tmp_path: Path) -> Path:
    with tarfile.open(SEEDS / "plain.tar.xz") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_a_stopped_process_is_noted_as_one_that_ran(images: Path) -> None:
    core = images / "core-1001.img"
    before = core.read_bytes()
    assert not task_states.was_stopped(core)
    change_first(core, STATE, STOPPED)
    assert task_states.was_stopped(core)
    for _ in range(2):
        task_states.let_go_on(images, [1001])
        assert not task_states.was_stopped(core)
        assert core.read_bytes() == before


@pytest.mark.parametrize("state", [ALIVE, DEAD])
def test_other_states_stay(images: Path, state: int) -> None:
    core = images / "core-1001.img"
    change_first(core, STATE, state)
    before = core.read_bytes()
    task_states.let_go_on(images, [1001])
    assert core.read_bytes() == before


def test_an_image_without_the_process_is_refused(images: Path) -> None:
    with pytest.raises(StepFailed, match="the image lacks process 4711"):
        task_states.let_go_on(images, [4711])


def test_a_damaged_image_is_refused_in_words(images: Path) -> None:
    core = images / "core-1001.img"
    raw = bytearray(core.read_bytes())
    raw[12:20] = b"\xff" * 8
    core.write_bytes(bytes(raw))
    with pytest.raises(StepFailed, match=r"core-1001.img"):
        task_states.let_go_on(images, [1001])
