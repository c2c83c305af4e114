# SPDX-License-Identifier: Apache-2.0
"""A host of a job loses its power, and the job goes on from its newest snapshot, bit for bit.

A host that is only silent towards the orchestrator leads to no rewind. A rewind cuts the file of a
rank's steps back to what it was, and the rank writes on from there. The file may be read meanwhile.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job, Step
from protected_job import events, wait_protected, wait_rewound
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.config.cluster import load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

EVERY_S = 2.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run the job, two may hold its images."""
    return new_lab("--hosts", "4", "--snapshots", f"every={EVERY_S:g}")


@pytest.fixture
def job(lab: LabSession) -> Iterator[Job]:
    """A DDP job of two on h0 and h1, in training, with a snapshot. All hosts run afterwards."""
    started = lab.start(f"rewound{next(_numbers)}", LONG, nnodes=2)
    started.wait_step(10)
    eventually(lambda: events(started, "protected"), "the first snapshot", 30)
    yield started
    for host in lab.lab.hosts:
        if lab.lab.machine(host).init is None:
            lab.boot(host)


def suspicion(lab: LabSession) -> float:
    return load(lab.lab.config).timeouts.suspicion


def steps(job: Job, rank: int) -> list[Step]:
    """The steps that are whole in the rank's file."""
    found = []
    for line in (job.out / f"rank{rank}.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [step for step in found if isinstance(step, dict) and "sha256" in step]


def steps_since(job: Job, rank: int, since: float) -> list[float]:
    """When the steps of after that time were made, in order."""
    return sorted(step["time"] for step in steps(job, rank) if step["time"] > since)


def wait_steps(job: Job, since: float, count: int) -> None:
    """Wait until both ranks have made so many steps after that time."""
    for rank in range(2):
        eventually(partial(_has_steps, job, rank, since, count), f"steps of rank {rank}")


def _has_steps(job: Job, rank: int, since: float, count: int) -> bool:
    return len(steps_since(job, rank, since)) >= count


def wait_past(job: Job, before: int) -> None:
    """Wait until the job is further than it was before the rewind, at ``before`` steps."""
    eventually(lambda: len(steps(job, 0)) > before + 2 * AFTER, "the job to be further than ever")


def assert_nothing_left(lab: LabSession, host: str, job: Job) -> None:
    """No sandbox, no network namespace, no process of the job is on the host."""
    inside = labs.entry(lab.lab.machine(host))
    script = "ip netns list; ls /var/lib/liveshift/capsules"

    def left() -> list[str]:
        said = subprocess.run([*inside, "sh", "-c", script], capture_output=True, text=True)
        return [line for line in said.stdout.split() if job.name in line]

    eventually(lambda: not left(), f"nothing of {job.name} to be left on {host}", 20)
    assert all(job.seen(rank).host != host for rank in range(2))


@pytest.mark.parametrize(
    ("rank", "seed"),
    [
        (1, 1),
        pytest.param(0, 2, marks=pytest.mark.long),  # rank 0 also dies in the next test
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(0, 4, marks=pytest.mark.long),
    ],
)
def test_a_job_goes_on_when_a_host_loses_power(
    lab: LabSession, job: Job, references: References, rank: int, seed: int
) -> None:
    victim, survivor = job.seen(rank).host, job.seen(1 - rank).host
    time.sleep(random.Random(seed).uniform(0, EVERY_S))
    cut = time.time()
    labs.kill_host(lab.lab, victim)
    before = len(steps(job, 0))
    (written,) = eventually(
        lambda: [e for e in events(job, "rewinding") if "goes back" in e.text], "the rewind", 30
    )
    (rewound,) = eventually(lambda: events(job, "rewound"), "the job to run again", 60)
    wait_steps(job, written.time, AFTER)
    went_on = max(steps_since(job, each, written.time)[0] for each in range(2))
    print(
        f"rank {rank} on {victim}, seed {seed}: {written.time - cut:.2f} s to the decision,"
        f" {went_on - cut:.2f} s to the first new step; {rewound.text}"
    )
    assert victim in written.text
    assert "training are repeated" in rewound.text
    now = [job.seen(each).host for each in range(2)]
    assert now[rank] not in (victim, survivor)
    assert now[1 - rank] == survivor, "it is restored in place"
    assert not [event.text for event in events(job, "rewinding") if "not back" in event.text]
    assert lab.host(victim).state == "lost"
    assert next(row for row in lab.status().jobs if row.name == job.name).state == "running"
    assert "went on here from a snapshot" in job.output()

    lab.boot(victim)
    assert_nothing_left(lab, victim, job)
    assert job.name not in " ".join(lab.host(victim).capsules)
    wait_past(job, before)
    job.assert_begins_like_never_moved(references)
    assert len(events(job, "rewound")) == 1, "the host that came back changed nothing"


@pytest.mark.long
def test_a_rewound_job_is_protected_again(
    lab: LabSession, job: Job, references: References
) -> None:
    """A second host dies, and so does the copy that the first rewind has made."""
    for count in (1, 2):
        victim, survivor = job.seen(0).host, job.seen(1).host
        labs.kill_host(lab.lab, victim)
        before = len(steps(job, 0))
        wait_rewound(job, count)
        wait_steps(job, time.time(), AFTER)
        assert job.seen(1).host == survivor, "it is restored in place"
        lab.boot(victim)
        wait_protected(job)
    wait_past(job, before)
    job.assert_begins_like_never_moved(references)


def test_who_is_only_silent_leads_to_no_rewind(lab: LabSession, job: Job) -> None:
    """An agent that is away, then a link to the orchestrator that is cut: of the host of rank 0 and
    of the other one."""
    lab.stop_agent("h1")
    time.sleep(3 * suspicion(lab))
    lab.start_agent("h1")
    job.go_on(AFTER)
    assert not events(job, "rewinding")
    for host in ("h0", "h1"):
        labs.separate(lab.lab, host, "ctl")
        try:
            time.sleep(3 * suspicion(lab))
            assert lab.host(host).state == "lost"
            job.go_on(AFTER)
        finally:
            labs.rejoin(lab.lab, host, "ctl")
        eventually(partial(_is_up, lab, host), f"{host} to be heard", 20)
        job.go_on(AFTER)
        assert not events(job, "rewinding")
    job.stop()


def _is_up(lab: LabSession, host: str) -> bool:
    return lab.host(host).state == "up"
