# SPDX-License-Identifier: Apache-2.0
"""Jobs of jobs/chain.py: what must be true of every one, and one that has a file with holes."""

from __future__ import annotations

import json

from chain import link
from lab_session import CHAIN, LabSession
from moving_job import AFTER, Job

HOLES = 64 << 30


def assert_whole_chain(job: Job) -> None:
    """Every step of a job that has ended is there once, and follows from the one before."""
    value = ""
    for number, step in enumerate(job.steps(), start=1):
        value = link(value, number)
        assert (step["step"], step["value"]) == (number, value)
    assert json.loads((job.out / "final0.json").read_text())["sha256"] == value


def start_with_holes(lab: LabSession, name: str) -> Job:
    """A job with a file of 64 GB in /tmp that takes a few bytes."""
    make = f"truncate -s {HOLES} /tmp/holes && printf end >> /tmp/holes"
    job = lab.start(name, ("sh", "-c", f"{make} && exec {' '.join(CHAIN)}"))
    job.go_on(3)
    return job


def assert_kept_holes(job: Job) -> None:
    """It trains on, and the file is as it was where the job is now. Ends the job."""
    job.go_on(AFTER)
    capsule = job.session.lab.directory / job.capsule(0).host / "state/capsules" / f"{job.name}.0"
    seen = (capsule / "tmp" / "holes").stat()
    assert (seen.st_size, seen.st_blocks < 64) == (HOLES + 3, True)
    job.stop()
    assert_whole_chain(job)
