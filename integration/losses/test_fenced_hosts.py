# SPDX-License-Identifier: Apache-2.0
"""The orchestrator hears no host of a job, and a command switches one of them off.

The command of these tests asks the test to do that, as one for real hosts asks their management
controllers. The host of the job lives meanwhile, and the job trains on: only the cable is out. So a
job that was restored before its host is off would train twice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, steps, steps_since, wait_protected
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

PROGRAM = """#!/bin/sh
touch {place}/asked-$LIVESHIFT_HOST
until [ -e {place}/off-$LIVESHIFT_HOST ]; do sleep 0.1; done
"""
AFTER_S = 4.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def program(place: Path) -> Path:
    made = place / "power-off"
    made.write_text(PROGRAM.format(place=place))
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, program: Path) -> LabSession:
    snapshots = f'every=2,fence_after={AFTER_S:g},fence=["{program}"]'
    return new_lab("--hosts", "3", "--snapshots", snapshots, "--timeouts", "suspicion=2")


@pytest.fixture
def job(lab: LabSession) -> Iterator[Job]:
    """A job of one rank, with a snapshot on another host. All hosts run afterwards, and all cables
    are in."""
    started = lab.start(f"fenced{next(_numbers)}", LONG, nnodes=1)
    started.wait_step(10)
    wait_protected(started)
    home = started.seen(0).host
    yield started
    for other in labs.cut_off_from(lab.lab, home):
        labs.rejoin(lab.lab, home, other)  # The orchestrator must reach the job to stop it.
    started.stop()
    if lab.lab.machine(home).init is None:
        labs.boot_host(lab.lab, home)
        labs.link(lab.lab, home, cut=False)  # the host remembers that its cable is out
        lab.start_agent(home)


def test_a_job_on_one_host_is_taken_back_once_that_host_is_off(
    lab: LabSession, job: Job, references: References, place: Path
) -> None:
    home = job.seen(0).host
    labs.link(lab.lab, home, cut=True)
    cut = time.time()
    eventually((place / f"asked-{home}").exists, "the command to be run", 30)
    alone = len(steps(job, 0))
    eventually(lambda: len(steps(job, 0)) > alone, "the job to train on, cut off")
    assert not events(job, "rewinding"), "it may train there"
    labs.kill_host(lab.lab, home)
    off, before = time.time(), len(steps(job, 0))
    (place / f"off-{home}").touch()
    (rewound,) = eventually(lambda: events(job, "rewound"), "the job to run again", 60)
    eventually(lambda: len(steps_since(job, 0, rewound.time)) > AFTER, "new steps")
    eventually(lambda: len(steps(job, 0)) > before + AFTER, "the job to be further than ever")
    fencing = events(job, "fencing")
    begun = next(event for event in fencing if f" for {home}" in event.text)
    ended = next(event for event in fencing if f"for {home}, has ended with code 0" in event.text)
    assert cut + AFTER_S < begun.time < off < ended.time < rewound.time
    assert job.seen(0).host != home
    job.assert_begins_like_never_moved(references)


def test_a_job_that_other_hosts_reach_is_left_alone(lab: LabSession, job: Job, place: Path) -> None:
    home = job.seen(0).host
    asked = place / f"asked-{home}"
    asked.unlink(missing_ok=True)
    labs.separate(lab.lab, home, "ctl")
    said = eventually(lambda: events(job, "fencing"), "the orchestrator to see it", 30)
    why = f"{home}: not fenced, as other hosts reach {home}, so the job may be well"
    assert [event.text for event in said] == [why]
    now = len(steps(job, 0))
    eventually(lambda: len(steps(job, 0)) > now + AFTER, "the job to train on")
    assert not asked.exists()
    assert not events(job, "rewinding")
    labs.rejoin(lab.lab, home, "ctl")
    eventually(lambda: lab.host(home).state == "up", "it to be heard", 30)
