# SPDX-License-Identifier: Apache-2.0
"""Each harm at each point of a snapshot, of a rewind and of a suspension, and while a job rests.

This plays the fault matrix's table of snapshots (fault_matrix/snapshot_table.py says what each cell
must come to), as `make fault-matrix` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_matrix import held, snapshot_table
from fault_matrix.snapshot_cell import FURTHER, play
from fault_matrix.snapshot_scene import SnapshotScene
from fault_matrix.snapshot_table import SnapshotCell
from fault_matrix.stage import RANKS, SUSPICION_S
from lab_session import eventually
from protected_job import events, wait_protected
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.daemon.faultpoints import SNAPSHOT_POINTS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

STALL_S = 3 * SUSPICION_S
"""As long as a host must be silent to be lost if it fell silent in a pause; the full matrix stalls
daemons for 30 s."""


def test_the_table_meets_every_fault_and_every_point() -> None:
    whole = snapshot_table.cells()
    assert len(whole) >= 130
    assert {cell.point for cell in whole} == set(snapshot_table.POINTS)
    assert {cell.column.point for cell in whole} - {""} == set(SNAPSHOT_POINTS)
    assert {cell.fault for cell in whole} == set(snapshot_table.FAULTS)
    assert all(cell.outcomes for cell in whole)
    assert all(cell.reason for cell in whole if len(cell.outcomes) > 1)
    assert {cell.column.during for cell in whole if cell.short} == {
        "snapshot",
        "rewind",
        "loss",
        "suspension",
        "suspended",
    }


def parameters() -> Iterator[Any]:
    for cell in snapshot_table.cells():
        marks = () if cell.short else (pytest.mark.long,)
        yield pytest.param(cell, marks=marks, id=cell.name)


@pytest.fixture(scope="module")
def scene(place: Path, references: References) -> Iterator[SnapshotScene]:
    made = SnapshotScene(place, references, STALL_S)
    yield made
    made.strike()
    os.environ.pop(held.VARIABLE)


@pytest.mark.parametrize("cell", list(parameters()))
def test_cell(scene: SnapshotScene, cell: SnapshotCell) -> None:
    found = play(cell, scene)
    print(f"{cell.name}: {found.outcome} in {found.seconds:.1f} s, gap {found.gap_s:.1f} s")
    assert found.passed, f"{found.outcome}: {found.error}\n{found.trace}"


def test_a_host_that_only_the_orchestrator_does_not_hear_leads_to_no_rewind(
    scene: SnapshotScene,
) -> None:
    """It falls silent in the middle of a snapshot, and the job trains on."""
    scene.prepare()
    job = scene.job
    before = len(events(job, "rewinding"))
    for rank in range(RANKS):  # either host may be the one that is held
        wait_protected(job)
        host = job.seen(rank).host
        scene.held.arm("snapshot.dumped")
        scene.held.wait("snapshot.dumped")
        labs.separate(scene.lab, host, "ctl")
        try:
            scene.held.clear()
            time.sleep(4 * SUSPICION_S)
            assert scene.session.host(host).state == "lost"
            job.go_on(FURTHER)
        finally:
            labs.rejoin(scene.lab, host, "ctl")
        eventually(scene.all_up, "all hosts to be up")
    wait_protected(job)
    assert len(events(job, "rewinding")) == before
    scene.assert_steps_are_right([0] * RANKS)
