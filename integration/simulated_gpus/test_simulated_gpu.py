# SPDX-License-Identifier: Apache-2.0
"""Ranks that talk by NCCL move: quiesced, communicators torn down, dumped by real CRIU, rebuilt.

On the doubles (device_jobs.py). Losses and parameters must be those of a run without liveshift,
and the watchdog thread of each rank, which asks NCCL for errors all the while, must see none.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from device_jobs import Device
from gpu_lab import gpu_lab
from lab_session import LabSession, NewLab, eventually
from moving_job import Job
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, place: Path) -> LabSession:
    sizes = {f"h{host}": (1024,) for host in range(4)}
    return gpu_lab(new_lab, place, sizes, "--precopy", "enabled=false").session


@pytest.fixture(scope="module")
def gpu(place: Path) -> Device:
    return Device.built(place / "doubles")


def started(lab: LabSession, gpu: Device, name: str, steps: int = 600) -> Job:
    """Data-parallel training on two hosts' simulated GPUs, under way. It trains through three moves
    on a busy machine too."""
    job = lab.start(name, gpu.ddp(steps), nnodes=2)
    job.wait_step(10)
    return job


def assert_rebuilt(job: Job) -> None:
    """Each move found a boundary of NCCL's clocks, and made both communicators again."""
    assert job.output().count("simulated GPU") == 2
    for row in job.moves:
        detail = {phase.name: phase.detail for phase in row.phases}
        assert re.match(r"paused after collective \d+ of nccl", detail["quiesce"]), detail
        assert re.match(r"2 communicators rebuilt in \d", detail["reopen"]), detail


def assert_same(job: Job, references: References) -> None:
    result = job.result(2)
    job.assert_trained_across(2)
    result.assert_equals(references.of(job.argv, job.nnodes, 2))


def test_each_rank_moves(lab: LabSession, gpu: Device, references: References) -> None:
    """Rank 0 has the communicators' roots: their listeners end with them and are made anew."""
    job = started(lab, gpu, "each")
    for index in (1, 0, 0):
        job.migrate(index)
        job.go_on(5)
    assert len(job.moves) == 3
    assert_rebuilt(job)
    assert_same(job, references)


@pytest.mark.long
def test_both_ranks_move_at_once(lab: LabSession, gpu: Device, references: References) -> None:
    """The second move finds the job at the first one's boundary, or waits for its end."""
    job = started(lab, gpu, "both")
    moving = [lab.popen("migrate", f"both/{index}") for index in (0, 1)]
    try:
        for one in moving:
            _, err = one.communicate(timeout=90)
            assert one.returncode == 0, err.decode()
    finally:
        for one in moving:
            one.kill()
    rows = job.migrations()
    assert [row.state for row in rows] == ["done", "done"]
    assert sum("communicators rebuilt" in phase.detail for row in rows for phase in row.phases)
    job.go_on(5)
    result = job.result(2)
    result.assert_equals(references.of(job.argv, job.nnodes, 2))


def test_a_move_that_fails_leaves_communicators_rebuilt(
    lab: LabSession, gpu: Device, references: References
) -> None:
    job = started(lab, gpu, "fails")
    lab.cli("lab", "link", "h2", "--rate", "300mbit")  # some seconds in which to do harm
    try:
        with lab.popen("migrate", "fails/1", "--to", "h2") as moving:
            eventually(lambda: [r for r in lab.status().moving if r.state == "freezing"], "it", 20)
            with lab.images_full("h2"):
                _, said = moving.communicate(timeout=60)
    finally:
        lab.cli("lab", "link", "h2", "--rate", "none", "--mend")
    assert moving.returncode == 1
    assert b"No space left on device" in said
    (row,) = job.migrations()
    assert row.state == "failed"
    assert any("communicators rebuilt" in phase.detail for phase in row.phases)
    job.go_on(5)
    job.migrate(1, "h2")
    assert_same(job, references)


@pytest.mark.long
@pytest.mark.parametrize("who", ["ctl", "h0"])
def test_a_daemon_that_dies_while_communicators_are_down(
    lab: LabSession, gpu: Device, references: References, who: str
) -> None:
    """The orchestrator, or the agent of the rank that stays: the job waits for its next life."""
    job = started(lab, gpu, f"dies-{who}")
    stays = job.capsule(0).host
    victim = who if who == "ctl" else stays
    lab.cli("lab", "link", "h3", "--rate", "300mbit")  # some seconds in which to do harm
    try:
        with lab.popen("migrate", f"{job.name}/1", "--to", "h3") as moving:
            eventually(lambda: [r for r in lab.status().moving if r.state == "freezing"], "it", 20)
            labs.stop_daemon(lab.lab, victim)
            labs.start_daemon(lab.lab, victim)
            moving.communicate(timeout=90)
    finally:
        lab.cli("lab", "link", "h3", "--rate", "none", "--mend")
    eventually(lambda: job.migrations()[-1].state in ("done", "failed"), "the move to end", 60)
    (row,) = job.migrations()
    assert any("communicators rebuilt" in phase.detail for phase in row.phases), row
    job.go_on(5)
    result = job.result(2)
    result.assert_equals(references.of(job.argv, job.nnodes, 2))


@pytest.mark.long
def test_a_c_program_with_three_ranks(lab: LabSession, gpu: Device, place: Path) -> None:
    """Two threads with communicators of their own, groups, pipelines, splits that come and go."""
    argv = gpu.train(3, 5000)
    job = lab.start("train", argv, nnodes=3)
    for index, step, to in (
        (1, "step 50\n", "h3"),
        (0, "step 300\n", "h1"),
        (2, "step 600\n", "h0"),
    ):
        eventually(lambda: step in job.output(), f"{step!r}", 60)  # noqa: B023 - called in this turn only
        job.migrate(index, to)
    job.wait_end(120)
    found = re.findall(r"train/(\d): result (\w+)", job.output())
    out = place / "train-alone"
    out.mkdir()
    alone = [
        subprocess.Popen(
            [word.replace("{out}", str(out)).replace("$RANK", str(rank)) for word in argv],
            env={"NCCL_HOSTID": f"alone{rank}", "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    wanted = [re.findall(r"result (\w+)", one.communicate(timeout=120)[0])[0] for one in alone]
    assert [one.returncode for one in alone] == [0, 0, 0]
    assert sorted(found) == [(str(rank), result) for rank, result in enumerate(wanted)]
    assert len(job.moves) == 3
    for row in job.moves:
        assert any("communicators rebuilt" in phase.detail for phase in row.phases), row
