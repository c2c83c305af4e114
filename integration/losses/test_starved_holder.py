# SPDX-License-Identifier: Apache-2.0
"""The agent of a holder is stopped just as a snapshot freezes the job. The job does not wait for
it: the snapshot fails, and the job trains on, protected by the one before."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, wait_protected
from reference_runs import References

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(240)]

LONGEST_S = 5.0
"""A second of silence, the freeze itself, and what two busy cores add. Twice the suspicion, after
which an image that makes no progress is given up in a move, is 10 s."""


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "starved-points") as made:
        yield made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, points: Held) -> LabSession:
    return new_lab("--hosts", "4", "--snapshots", "every=2")


@contextmanager
def starved(lab: LabSession, host: str) -> Iterator[None]:
    daemon = lab.lab.machine(host).daemon
    assert daemon is not None
    daemon.send(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.send(signal.SIGCONT)


def longest_pause(job: Job, rank: int, since: float) -> float:
    times = [float(step["time"]) for step in job.steps(rank)]
    before = max(at for at in times if at <= since)
    return max(b - a for a, b in pairwise([at for at in times if at >= before]))


@pytest.mark.parametrize("point", ["snapshot.locked", "snapshot.dumped"])
def test_a_holder_that_stands_still_does_not_keep_the_job_paused(
    lab: LabSession, points: Held, references: References, point: str
) -> None:
    job = lab.start(f"starved-{point[9:]}", LONG, nnodes=2)
    job.wait_step(10)
    eventually(lambda: events(job, "protected"), "the first snapshot", 30)
    job.go_on(AFTER)
    holder = job.protection().holders[0]
    points.arm(point)
    points.wait(point)
    began = time.time()
    with starved(lab, holder):
        points.release(point)
        job.wait_step(len(job.steps()) + 30)
        pauses = [longest_pause(job, rank, began) for rank in range(2)]
    print(f"{point}: paused for {max(pauses):.2f} s")
    assert max(pauses) < LONGEST_S
    assert not events(job, "rewinding")
    wait_protected(job)
    job.assert_begins_like_never_moved(references)
