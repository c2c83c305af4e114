# SPDX-License-Identifier: Apache-2.0
"""jobs/cold.py, two ranks with much memory that they hardly ever write, and what it must be in the
end: the job that never moved."""

from __future__ import annotations

import hashlib
import json

import numpy
from lab_session import JOBS, LabSession
from moving_job import AFTER, Job
from reference_runs import References

COLD = 192 << 20
"""Bytes of each rank."""
RANKS = 2
ENDLESS = 100_000
"""Steps. The job is told when it is enough: however long its moves take on a machine with other
work, it trains before, between and after them."""
BEGUN = 20
"""Steps before a test begins."""
REFERENCE = 499
"""Steps that a job usually has made when it is stopped, or fewer: all are compared with one run."""


def command(*more: str) -> tuple[str, ...]:
    memory = ("python", str(JOBS / "cold.py"), "--out", "{out}", "--cold", str(COLD))
    return (*memory, "--steps", str(ENDLESS), "--pace", "0.05", "--enough", "{out}/enough", *more)


def start(lab: LabSession, name: str, *more: str) -> Job:
    job = lab.start(name, command(*more), nnodes=RANKS)
    job.wait_step(BEGUN)
    return job


def assert_same_as_never_moved(job: Job, references: References) -> None:
    """Stop the job. It trained before and after its moves; each step is that of a job that never
    moved, and its memory is what it wrote."""
    job.go_on(2 * AFTER)
    job.stop()
    references.further_than(max(REFERENCE, len(job.steps())), job.argv, RANKS)
    job.assert_begins_like_never_moved(references)
    job.assert_trained_across(RANKS)
    job.assert_quiesced(communicates=True)
    assert_memory_is_what_it_wrote(job)


def assert_memory_is_what_it_wrote(job: Job) -> None:
    """Every byte of a job that has ended. Its steps are played again here, as jobs/cold.py makes
    them; they read only some of the memory."""
    steps = len(job.steps(0))
    for rank in range(RANKS):
        noise = numpy.random.Generator(numpy.random.SFC64(rank))
        cold = noise.integers(0, 1 << 63, COLD // 8, numpy.int64)
        for step in range(1, steps + 1):
            at = step * 7919 * 512 % (len(cold) - (1 << 16))
            cold[at : at + 512] += step
        found = json.loads((job.out / f"final{rank}.json").read_text())["cold"]
        assert found == hashlib.sha256(cold.data).hexdigest(), f"memory of rank {rank}"
