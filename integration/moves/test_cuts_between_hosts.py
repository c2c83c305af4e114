# SPDX-License-Identifier: Apache-2.0
"""The link between two hosts of a job is cut, and the orchestrator hears both: the job leaves one
of them and goes on from its newest snapshot, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, steps, steps_since, wait_past, wait_protected, wait_steps
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import Event, SnapshotJob, SnapshotOrdered

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SUSPICION_S = 1.5
HEARTBEAT_S = 0.3
TIMES = 3.0
"""A rewind takes at most so many times what one takes that a person orders. Both are measured once,
beside whatever else the machine does."""
OTHERS = {"h0": ["h1", "h2", "h3"], "h1": ["h0"]}
"""The hosts from which h0 or h1 is cut off."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    timeouts = f"collective=120,heartbeat={HEARTBEAT_S},suspicion={SUSPICION_S},grace=1"
    return new_lab("--hosts", "4", "--snapshots", "every=3", "--timeouts", timeouts)


@pytest.fixture
def job(lab: LabSession, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A DDP job of two on h0 and h1, protected. No link is cut afterwards."""
    started = lab.start(f"cut-{request.node.callspec.id}", LONG, nnodes=2)
    started.wait_step(10)
    wait_protected(started)
    assert {started.seen(rank).host for rank in range(2)} == {"h0", "h1"}
    yield started
    for host in lab.lab.hosts:
        for other in labs.cut_off_from(lab.lab, host):
            labs.rejoin(lab.lab, host, other)
    started.stop()


@pytest.mark.parametrize(
    ("left", "snapshot"),
    [
        pytest.param("h1", False, id="h1"),
        pytest.param("h1", True, id="h1-in-a-snapshot"),
        pytest.param("h0", False, id="h0", marks=pytest.mark.long),
    ],
)
def test_the_job_leaves_a_host_that_its_peer_does_not_reach(
    lab: LabSession, job: Job, references: References, left: str, snapshot: bool
) -> None:
    """h1 is not reached by h0 alone; h0 is not reached by any host, so it is the one to leave.
    ``snapshot``: one begins before that is noticed, and the job can come to no boundary."""
    stays = {"h0": "h1", "h1": "h0"}[left]
    rank = next(rank for rank in range(2) if job.seen(rank).host == left)
    to = lab.place / f"{job.name}-saved"
    cut = time.time()
    for other in OTHERS[left]:
        labs.separate(lab.lab, left, other)
    if snapshot:  # not by a command, which may begin only after that is noticed
        with Client(lab.lab.socket) as client:
            client.get(SnapshotOrdered, SnapshotJob(job.name, str(to)))
    before = len(steps(job, 0))
    took = goes_on(job, 1)
    (written,) = goes_back(job)
    decided = written.time - cut
    assert "h0 and h1 do not reach each other" in written.text
    if snapshot:
        (failed,) = events(job, "not saved")
        assert failed.text == "the job goes on: given up: the job is rewound"
    assert job.seen(1 - rank).host == stays, "it is restored in place"
    assert job.seen(rank).host in ("h2", "h3")
    assert all(lab.host(host).state == "up" for host in ("h0", "h1"))
    wait_protected(job)
    wait_past(job, before)
    assert len(events(job, "rewound")) == 1
    assert lab.cli("rewind", job.name, "--yes").code == 0
    usual = goes_on(job, 2)
    print(f"{left}: {decided:.2f} s to the decision, {took:.2f} s to a step (usual: {usual:.2f} s)")
    assert took < TIMES * usual
    assert decided < SUSPICION_S + 2 * HEARTBEAT_S + TIMES * usual
    job.assert_begins_like_never_moved(references)


def goes_back(job: Job) -> list[Event]:
    return [event for event in events(job, "rewinding") if "goes back" in event.text]


def goes_on(job: Job, times: int) -> float:
    """Wait until the job trains after its ``times``-th rewind. Return the seconds from the write of
    the rewind until all ranks had made a step."""
    eventually(lambda: len(events(job, "rewound")) == times, "the job to run again", 60)
    back = goes_back(job)[-1].time
    wait_steps(job, back, AFTER)
    return max(steps_since(job, each, back)[0] for each in range(2)) - back
