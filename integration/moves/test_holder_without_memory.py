# SPDX-License-Identifier: Apache-2.0
"""A holder whose memory is short in the middle of a snapshot: the snapshot is given up, the job
trains on, and the snapshot before is as good as ever. The next one comes when there is room.

There is one holder, so no other one can take its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from fault_matrix import memory
from fault_matrix.held import Held, holding
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER
from protected_job import events, wait_protected
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(300)]

SHORT_S = 5.0
"""For how long there is no room: several snapshots are due meanwhile."""

Short = Callable[[LabSession, str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "memory-points") as made:
        yield made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, points: Held) -> LabSession:
    """Two hosts run the job, one may hold its images."""
    return new_lab("--hosts", "3", "--snapshots", "every=1")


@contextmanager
def images_full(lab: LabSession, host: str) -> Iterator[None]:
    with lab.images_full(host):
        yield


@contextmanager
def agent_starved(lab: LabSession, host: str) -> Iterator[None]:
    """The agent gets next to no memory: perhaps the kernel ends it, and it is started again."""
    daemon = lab.lab.machine(host).daemon
    assert daemon is not None
    with memory.scarce(f"liveshift-{lab.name}", [daemon.pid]) as failures:
        yield
        assert failures() > 0, "the limit was never met"
    labs.start_daemon(lab.lab, host)


def up(lab: LabSession, host: str) -> bool:
    return lab.host(host).state == "up"


@pytest.mark.parametrize(
    ("short", "point"),
    [
        (images_full, "snapshot.locked"),
        (images_full, "snapshot.dumped"),
        # What is dumped needs no more of the agent's memory.
        pytest.param(
            *(agent_starved, "snapshot.locked"),
            marks=pytest.mark.machine("cgroup with a memory controller"),
        ),
    ],
)
def test_the_snapshot_is_given_up_and_the_next_one_works(
    lab: LabSession, points: Held, references: References, short: Short, point: str
) -> None:
    job = lab.start(f"short{len(lab.jobs)}", LONG, nnodes=2)
    job.wait_step(10)
    wait_protected(job)
    (holder,) = set(job.protection().holders)
    points.arm(point)
    points.wait(point)  # at one source: the snapshot is under way
    before = job.protection().newest
    with short(lab, holder):
        points.clear()
        time.sleep(SHORT_S)
        job.go_on(AFTER)
        row = job.protection()
        print(f"{point}: {row.newest}, before {before}; {row.trouble or row.why_not}")
        assert row.newest == before, "the snapshot was given up"
        assert row.trouble or row.why_not
        points.arm("snapshot.locked")  # no later one becomes complete before a host dies
    eventually(lambda: up(lab, holder), f"{holder} to be up")
    rewound = len(events(job, "rewound"))
    victim = job.seen(1).host
    labs.kill_host(lab.lab, victim)
    points.clear()
    eventually(lambda: len(events(job, "rewound")) > rewound, "the job to run again")
    assert f"runs again from {before}: " in events(job, "rewound")[-1].text
    lab.boot(victim)
    wait_protected(job)
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)
