# SPDX-License-Identifier: Apache-2.0
"""Whether the fast path works is tried, watched and remembered."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cuda_process import doubles
from doubles.gpu import build
from gpu_helper import A, B, StartHelper, StartProcess, end_helper, helper, process
from waits import until

from liveshift.cuda_snapshot.fast_path import probe
from liveshift.cuda_snapshot.helper.client import GpuHelper

__all__ = ["doubles", "helper", "process"]

ONE = f"{A}:H200:1GiB"
Doubles = build.Doubles


def children_of(uuid: str) -> list[str]:
    """The trial's and its rank's processes: they have the GPU as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if uuid.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_it_works_and_leaves_nothing(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCUDA_DEVICES", ONE)
    assert probe.watched(A, doubles.folder) == ("", True)
    until(lambda: not children_of(A))


@pytest.mark.parametrize(
    ("environment", "why", "lasting"),
    [
        ({"SIMCUDA_BARE_RESERVATIONS": "refuse"}, "checkpoint: .*NOT_SUPPORTED", True),
        ({"SIMCUDA_DEVICES": f"{A}:H200:1MiB"}, "starting with CUDA: .*OUT_OF_MEMORY", False),
        ({"SIMCUDA_DEVICES": f"{B}:H200:1GiB"}, "starting with CUDA: .*sees no GPU", True),
        ({"SIMCUDA_DRIVER": "560"}, "starting with CUDA: .*has no cuCheckpoint", True),
    ],
)
def test_why_it_does_not_work(
    doubles: Doubles,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    why: str,
    lasting: bool,
) -> None:
    for name, value in {"SIMCUDA_DEVICES": ONE, **environment}.items():
        monkeypatch.setenv(name, value)
    said, again = probe.watched(A, doubles.folder, lock_ms=1000)
    assert again is lasting
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)
    until(lambda: not children_of(A))


def test_a_step_that_hangs_is_given_up(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCUDA_DEVICES", ONE)
    monkeypatch.setenv("SIMCUDA_BARE_RESERVATIONS", "hang")
    begin = time.monotonic()
    why = probe.watched(A, doubles.folder, step_s=1)
    assert why == ("checkpoint did not end within 1 s", True)
    assert time.monotonic() - begin < 30
    until(lambda: not children_of(A))


def settled(gpu: GpuHelper) -> str:
    until(lambda: gpu.host().fast_path != probe.PROBING, 60)
    return gpu.host().fast_path


def test_a_helper_tries_it_and_remembers(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu = helper()
    assert settled(gpu) == ""
    known = json.loads((tmp_path / probe.FILE).read_text())
    assert known["why"] == ""
    assert known["driver"] == "580.0"
    (tmp_path / probe.FILE).write_text(json.dumps({**known, "why": "as it was found"}))
    end_helper(gpu)
    until(lambda: not (tmp_path / "gpu.sock").exists())
    gpu = helper()
    assert settled(gpu) == "as it was found"
    end_helper(gpu)
    until(lambda: not (tmp_path / "gpu.sock").exists())
    assert settled(helper(SIMCUDA_DRIVER="590")) == "", "another driver is tried anew"


def test_what_could_not_be_tried_is_not_remembered(helper: StartHelper, tmp_path: Path) -> None:
    gpu = helper(SIMCUDA_DEVICES=f"{A}:H200:1GiB mig,{B}:H200:1MiB")
    assert "OUT_OF_MEMORY" in settled(gpu)
    assert not (tmp_path / probe.FILE).exists()


def test_nothing_is_tried_where_nothing_can_be_checkpointed(helper: StartHelper) -> None:
    assert "not tried: every GPU is partitioned by MIG" in settled(
        helper(SIMCUDA_DEVICES=f"{A}:H200:1GiB mig")
    )
