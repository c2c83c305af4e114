# SPDX-License-Identifier: Apache-2.0
"""`liveshift inspect` through real daemons, of ranks that train on the simulated CUDA and NCCL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lab_session import JOBS, LabSession, NewLab
from moving_job import Job
from open_python import NOBODY, OpenPython

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

TESTS = Path(__file__).resolve().parents[1] / "tests"
BUFFERS = 4 * (64 * 64 + 64 + 64 * 64 + 64 + 16 + 16 + 1)
"""Bytes that a rank of device_ddp.py allocates: gradients, what is passed on, the loss."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3")


@pytest.fixture(scope="module")
def libraries(place: Path) -> str:
    """Where the doubles are, for LD_LIBRARY_PATH."""
    sys.path.insert(0, str(TESTS))
    try:
        from doubles.gpu.build import build
        from doubles.gpu.build_nccl import build_nccl
    finally:
        sys.path.remove(str(TESTS))
    folder = place / "doubles"
    return f"{build(folder).folder}:{build_nccl(folder).parent}"


def process(lab: LabSession, capsule: str) -> tuple[str, dict[str, Any]]:
    """The host that a capsule is on, and the one process of it that has a page."""
    (found,) = lab.json("inspect", capsule)["capsules"]
    (seen,) = found["processes"]
    return found["host"], seen


def test_a_rank_is_inspected_where_it_runs_before_and_after_its_move(
    lab: LabSession, libraries: str, open_python: OpenPython
) -> None:
    argv = (
        *("env", f"LD_LIBRARY_PATH={libraries}", sys.executable, str(JOBS / "device_ddp.py")),
        *("--steps", "100000", "--pace", "0.05", "--out", "{out}"),
    )
    job: Job = lab.start("held", argv, nnodes=2)
    job.wait_step(10)
    host, before = process(lab, "held/1")
    assert (host, before["rank"], before["driver"]) == ("h1", 1, 13000)
    assert before["memory"] == [{"device": 0, "kind": "device", "count": 7, "bytes": BUFFERS}]
    assert before["obstacles"] == []
    assert [(u["bytes"], u["streams"] > 0, u["carried"]) for u in before["devices"]] == [
        (BUFFERS, True, 1)
    ]
    made = {row["made_by"]: row for row in before["communicators"]}
    assert {(row["size"], row["rank"], row["state"]) for row in made.values()} == {(2, 1, "live")}
    assert made["init"]["operations"] > 10 * 6
    assert made["split"]["operations"] >= 10

    job.migrate(1)
    job.go_on(5)
    host, after = process(lab, "held/1")
    assert host == "h2"
    assert after["pid"] == before["pid"]
    assert after["memory"] == before["memory"]
    assert {row["generation"] for row in after["communicators"]} == {1}

    text = lab.cli("inspect", "held").out
    assert "held/0 on h0: rank 0" in text
    assert "held/1 on h2: rank 1" in text
    said = lab.refused("inspect", "held/1", code=7, user=NOBODY, python=open_python.python)
    assert 'may not see held: it is another user\'s, that needs the role "view"' in said
    lab.cli("stop", "held")
