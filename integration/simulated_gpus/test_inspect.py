# SPDX-License-Identifier: Apache-2.0
"""`liveshift inspect` through real daemons, of ranks that train on the simulated CUDA and NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_lab import GpuLab, gpu_lab
from lab_session import LabSession, NewLab
from moving_job import Job
from open_python import NOBODY, OpenPython

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

BUFFERS = 4 * (64 * 64 + 64 + 64 * 64 + 64 + 16 + 16 + 1)
"""Bytes that a rank of device_ddp.py allocates: gradients, what is passed on, the loss."""


@pytest.fixture(scope="module")
def gpus(new_lab: NewLab, place: Path) -> GpuLab:
    return gpu_lab(new_lab, place, {f"h{host}": (1024,) for host in range(3)})


def process(lab: LabSession, capsule: str) -> tuple[str, dict[str, Any]]:
    """The host that a capsule is on, and the one process of it that has a page."""
    (found,) = lab.json("inspect", capsule)["capsules"]
    (seen,) = found["processes"]
    return found["host"], seen


def test_a_rank_is_inspected_where_it_runs_before_and_after_its_move(
    gpus: GpuLab, open_python: OpenPython
) -> None:
    lab = gpus.session
    job: Job = lab.start("held", gpus.device.ddp(100_000), nnodes=2)
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
