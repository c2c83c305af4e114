# SPDX-License-Identifier: Apache-2.0
"""A rank with device memory that is stopped: by its move, below a parent that stops itself then, or
by a user. On the doubles (gpu_lab.py)."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from gpu_lab import GpuLab, gpu_lab
from lab_session import NewLab, eventually
from moving_job import Job

from liveshift.cuda_snapshot import threads

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

GPUS = {"h0": (420, 420), "h1": (420, 420)}


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, place: Path) -> GpuLab:
    return gpu_lab(new_lab, place, GPUS, "--slots", "2")


def stopped(job: Job) -> list[int]:
    """The processes of its capsule that are stopped, by their pids inside."""
    return [inner for inner, pid in job.seen(0).tasks.items() if threads.stopped(pid)]


@pytest.mark.long
def test_a_parent_that_stops_itself_with_the_rank_goes_on_after_the_move(lab: GpuLab) -> None:
    """script(1) does so, as do su(1) and sudo(8). If it stayed stopped, the job would not end."""
    train = shlex.join(lab.train())
    job = lab.session.start(
        "below-script", ("script", "--quiet", "--return", "--command", train, "/dev/null")
    )
    job.wait_step(5)
    for to in ("h1", "h0"):
        row = job.migrate(0, to)
        assert "1 CUDA process" in {p.name: p.detail for p in row.phases}["gpu save"]
        job.go_on(5)
        eventually(lambda: not stopped(job), "no process is stopped any more", 10)
    job.stop()
    assert job.code() == 0


def test_a_rank_that_a_user_has_stopped_is_refused_and_stays_stopped(lab: GpuLab) -> None:
    job = lab.start("stopped")
    source = job.seen(0)
    for pid in source.tasks.values():
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: len(stopped(job)) == len(source.tasks), "all of it is stopped")
    to = next(host for host in lab.gpus if host != source.host)
    said = lab.session.refused("migrate", "stopped/0", "--to", to)
    assert "is stopped (SIGSTOP): the driver waits for it" in said
    assert "SIGCONT" in said
    assert len(stopped(job)) == len(source.tasks)
    for pid in source.tasks.values():
        os.kill(pid, signal.SIGCONT)
    job.go_on(3)
    assert job.migrate(0, to).state == "done"
    job.go_on(3)
    job.stop()
