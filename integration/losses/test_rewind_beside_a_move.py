# SPDX-License-Identifier: Apache-2.0
"""A host of a job loses its power while another capsule of the job is moved. The move cannot save
what is lost, so the job does not wait for it: it goes back to its snapshot, bit for bit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from held_moves import held_at
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, wait_protected, wait_rewound
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.config.cluster import load
from liveshift.runtime.config.timeouts import Timeouts

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

SLOW = "50mbit"
"""A process with torch needs half a minute over such a link, and the link stays alive meanwhile."""
TIMEOUTS = "collective=120,heartbeat=0.5,suspicion=2.5,grace=1"
TIMES = 3.0
"""Beside a move, a rewind takes at most so many times what it takes without one, from its write to
the first new step of each rank. Both are measured once, beside whatever else the machine does."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "beside-moves-points") as made:
        yield made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, points: Held) -> LabSession:
    """Two hosts run the job, two hold its images, and the fifth one is where a capsule moves."""
    return new_lab("--hosts", "5", "--snapshots", "every=2", "--timeouts", TIMEOUTS)


@contextmanager
def protected(lab: LabSession) -> Iterator[Job]:
    """A DDP job of two, with a snapshot of its training: the import of torch is not repeated. All
    hosts run afterwards."""
    started = lab.start(f"beside{next(_numbers)}", LONG, nnodes=2)
    started.wait_step(10)
    wait_protected(started)
    yield started
    started.stop()
    for host in lab.lab.hosts:
        if lab.lab.machine(host).init is None:
            lab.boot(host)


@pytest.fixture
def job(lab: LabSession) -> Iterator[Job]:
    with protected(lab) as started:
        yield started


@pytest.fixture(scope="module")
def usual_s(lab: LabSession) -> float:
    """Seconds from the write of a rewind to new steps, on this machine and without a move."""
    with protected(lab) as job:
        moved, victim = job.seen(0).host, job.seen(1).host
        labs.kill_host(lab.lab, victim)
        return goes_on(job, moved)


def spare_of(job: Job) -> str:
    """The host that has neither a capsule of the job nor an image."""
    taken = {job.seen(0).host, job.seen(1).host, *job.protection().holders}
    (spare,) = set(job.session.lab.hosts) - taken
    return spare


def steps_since(job: Job, since: float, rank: int) -> list[float]:
    return [step["time"] for step in job.steps(rank) if step["time"] > since]


def written(job: Job) -> float:
    """When the rewind was written; 0.0 if it is not yet."""
    return next((e.time for e in events(job, "rewinding") if "goes back" in e.text), 0.0)


def goes_on(job: Job, moved: str) -> float:
    """Wait until all ranks have made a step again. Return the seconds from the write of the rewind
    until then. ``moved``: the host of rank 0."""
    wait_rewound(job, 1)
    back = written(job)
    news = [
        eventually(partial(steps_since, job, back, rank), f"a new step of rank {rank}")
        for rank in range(2)
    ]
    took = max(times[0] for times in news) - back
    assert job.seen(0).host == moved, "it is restored in place"
    job.go_on(AFTER)
    return took


def assert_no_later(job: Job, cut: float, moved: str, usual_s: float, limits: Timeouts) -> None:
    """``cut``: when the host of rank 1 lost its power. A machine on which a rewind takes long
    decides late, too."""
    took, decided = goes_on(job, moved), written(job) - cut
    print(f"{decided:.2f} s to the decision, {took:.2f} s to a new step (usual: {usual_s:.2f} s)")
    assert took < TIMES * usual_s
    assert decided < limits.suspicion + 2 * limits.heartbeat + usual_s


def test_a_long_precopy_of_another_capsule_delays_no_rewind(
    lab: LabSession, usual_s: float, job: Job
) -> None:
    moved, victim, spare = job.seen(0).host, job.seen(1).host, spare_of(job)
    labs.link(lab.lab, spare, rate=SLOW)
    try:
        with lab.popen("migrate", f"{job.name}/0", "--to", spare) as moving:
            eventually(lambda: job.migrations()[-1:], "the move to begin")
            eventually(lambda: job.migrations()[-1].state == "pre-copying", "the pre-copy")
            time.sleep(1.0)
            cut = time.time()
            labs.kill_host(lab.lab, victim)
            eventually(lambda: written(job), "the rewind", 30)
            labs.link(lab.lab, spare, rate="none")  # it may be a holder of the next snapshot
            assert_no_later(job, cut, moved, usual_s, load(lab.lab.config).timeouts)
            assert moving.wait(20) == 1
        assert job.migrations()[0].state == "rewound"
    finally:
        labs.link(lab.lab, spare, rate="none")


@pytest.mark.parametrize(
    ("point", "ends"),
    [
        pytest.param("orchestrator.prepared", ("rewound",), marks=pytest.mark.long),
        # It may also fail of the same silence.
        pytest.param("orchestrator.precopied", ("rewound", "failed"), marks=pytest.mark.long),
        ("orchestrator.frozen", ("rewound",)),
        pytest.param("orchestrator.committed", ("rewound",), marks=pytest.mark.long),
    ],
)
def test_nor_does_another_step(
    lab: LabSession,
    usual_s: float,
    job: Job,
    points: Held,
    references: References,
    point: str,
    ends: tuple[str, ...],
) -> None:
    """A move that has come to its gates waits there for a host that is not heard. Of one that is
    frozen or committed, both sides hold a copy. The job cannot show that it trains then, but its
    other host does not reach the lost one either."""
    moved, victim, spare = job.seen(0).host, job.seen(1).host, spare_of(job)
    with held_at(points, point, job, "--to", spare) as go_on:
        cut = time.time()
        labs.kill_host(lab.lab, victim)
        if point == "orchestrator.precopied":
            time.sleep(3 * load(lab.lab.config).timeouts.heartbeat)
            points.release(point)
        where = spare if point == "orchestrator.committed" else moved
        assert_no_later(job, cut, where, usual_s, load(lab.lab.config).timeouts)
        code, said = go_on()
    assert code != 0
    assert job.migrations()[0].state in ends, said
    job.wait_step(40)
    job.assert_begins_like_never_moved(references)
