# SPDX-License-Identifier: Apache-2.0
"""Ranks that talk by NCCL move: quiesced, communicators torn down, dumped by real CRIU, rebuilt.

On the simulated CUDA and NCCL (tests/doubles/gpu): device memory is host memory, streams are
threads, and a collective hangs until all of its members have come. The rest is real. Losses and
parameters must be those of a run without liveshift, and the watchdog thread of each rank, which
asks NCCL for errors all the while, must see none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lab_session import JOBS, LabSession, NewLab
from moving_job import Job
from reference_runs import References

TESTS = Path(__file__).resolve().parents[1] / "tests"


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "4")


@pytest.fixture(scope="module")
def libraries(place: Path) -> str:
    """Where the doubles are, for LD_LIBRARY_PATH."""
    sys.path.insert(0, str(TESTS))
    try:
        from doubles.gpu.build import build
        from doubles.gpu.build_nccl import build_nccl
    finally:
        sys.path.remove(str(TESTS))
    folder = place / "doubles"
    return f"{build(folder).folder}:{build_nccl(folder).parent}"


@pytest.fixture
def device(lab: LabSession, libraries: str, request: pytest.FixtureRequest) -> Job:
    """Data-parallel training on two hosts' simulated GPUs, under way."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:24].strip("-")
    argv = (
        *("env", f"LD_LIBRARY_PATH={libraries}", sys.executable, str(JOBS / "device_ddp.py")),
        *("--steps", "300", "--pace", "0.05", "--out", "{out}"),
    )
    job = lab.start(name, argv, nnodes=2)
    job.wait_step(10)
    return job


def assert_rebuilt(job: Job) -> None:
    """Each move found a boundary of NCCL's clocks, and made both communicators of both ranks
    again."""
    assert job.output().count("simulated GPU") == 2
    for row in job.moves:
        detail = {phase.name: phase.detail for phase in row.phases}
        assert re.match(r"after collective \d+ of nccl", detail["quiesce"]), detail
        assert re.match(r"2 communicators rebuilt in \d", detail["reopen"]), detail


def test_the_rank_that_follows_moves(device: Job, references: References) -> None:
    device.migrate(1)
    assert_rebuilt(device)
    assert_same(device, references)


def test_the_first_rank_moves_twice_and_the_other_once(device: Job, references: References) -> None:
    """Rank 0 has the communicators' roots: their listeners end with them and are made anew."""
    for index in (0, 1, 0):
        device.migrate(index)
        device.go_on(5)
    assert len(device.moves) == 3
    assert_rebuilt(device)
    assert_same(device, references)


def assert_same(job: Job, references: References) -> None:
    result = job.result(2)
    job.assert_trained_across(2)
    result.assert_equals(references.of(job.argv, job.nnodes, 2))
