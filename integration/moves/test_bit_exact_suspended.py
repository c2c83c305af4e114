# SPDX-License-Identifier: Apache-2.0
"""The scenarios (a) to (k) of test_bit_exact.py, suspended and resumed on other hosts.

A job that was away computes what it would have computed anyway, to the last bit, and makes each
step once.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chain_job import assert_kept_holes, start_with_holes
from kernel_job import KERNEL_OBJECTS, KernelJob
from lab_session import BRISK, GPT, LONG, LabSession, NewLab, a_lab
from moving_job import AFTER, BEFORE, Job
from open_python import NOBODY, OpenPython
from reference_runs import References
from scenarios import CARRIED, FSDP, LOADER, PLAIN_GPT, TRAIN_GPT, Scenario
from whereabouts import where

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(300)]

SCENARIOS = {
    "a-b-ddp-with-rendezvous": Scenario(TRAIN_GPT, 2, 2),
    "c-workers": Scenario(LOADER, 1, 2),
    "f-plain": Scenario(PLAIN_GPT, 2, 2, untouched=TRAIN_GPT),
    "g-fsdp": Scenario(FSDP, 2, 2),
}


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run a job, one may be drained, two may hold its image."""
    return new_lab("--hosts", "5")


@pytest.fixture(autouse=True)
def no_other_job(lab: LabSession) -> Iterator[None]:
    """A test that fails leaves its slots to the next one."""
    yield
    for job in lab.jobs:
        lab.cli("stop", job.name, code=None)
    for host in lab.lab.hosts:
        lab.cli("uncordon", host)
    lab.jobs.clear()


def away_and_back(job: Job, away_s: float = 0.0, user: int | None = None) -> None:
    """The very same processes leave their hosts, and come back on other ones."""
    lab = job.session
    before = [job.seen(index) for index in range(job.nnodes)]
    made = [len(job.steps(rank)) for rank in range(job.nnodes)]
    assert min(made) >= BEFORE or not any(made), "it trained before"
    said = lab.json("suspend", job.name, user=user)
    assert said["state"] == "suspended"
    for index in range(job.nnodes):
        assert where(lab.lab, f"{job.name}/{index}") == {}, "no process of it is left"
    time.sleep(away_s)
    lab.json("resume", job.name, user=user)
    after = [job.seen(index) for index in range(job.nnodes)]
    assert {each.host for each in after}.isdisjoint(each.host for each in before)
    for old, new in zip(before, after, strict=True):
        assert (new.tasks.keys(), new.users) == (old.tasks.keys(), old.users)


def assert_same_as_untouched(
    job: Job, scenario: Scenario, references: References, made: int = AFTER
) -> None:
    """It trains on; each step is there once, and all of it is as in an untouched run."""
    for rank in range(scenario.ranks):
        job.go_on(made, rank)
    result = job.result(scenario.ranks)
    wanted = references.of(scenario.untouched or job.argv, job.nnodes, scenario.ranks)
    result.assert_equals(wanted)


@pytest.mark.parametrize("kind", SCENARIOS)
def test_a_job_that_ends(lab: LabSession, references: References, kind: str) -> None:
    scenario = SCENARIOS[kind]
    job = lab.start(f"away-{kind}", scenario.argv, nnodes=scenario.nnodes)
    for rank in range(scenario.ranks):
        job.wait_step(10, rank)
    away_and_back(job)
    assert_same_as_untouched(job, scenario, references)


def test_d_moved_before_and_after(lab: LabSession, references: References) -> None:
    job = lab.start("away-d", LONG, nnodes=2)
    job.wait_step(10)
    job.migrate(1)
    job.go_on(3)
    away_and_back(job)
    job.go_on(3)
    job.migrate(0)
    job.migrate(1)
    job.go_on(AFTER)
    job.assert_quiesced(communicates=True)
    job.assert_begins_like_never_moved(references)


def test_e_drained_before_and_after(lab: LabSession, references: References) -> None:
    job = lab.start("away-e", LONG, nnodes=2)
    job.wait_step(10)
    for _ in range(2):
        first = job.seen(0).host
        job.drained(0)
        job.go_on(3)
        away_and_back(job)  # the host that was drained takes nothing and holds nothing
        assert first not in {job.seen(index).host for index in range(2)}
        lab.cli("uncordon", first)
        job.go_on(3)
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


def test_h_log_and_checkpoints_on_a_carried_path(
    lab: LabSession, references: References, place: Path
) -> None:
    """Twice, so that it may come back to where old copies of its files lie."""
    job = lab.start("away-h", (*CARRIED, "--own", "/var/tmp/away-h"))
    job.wait_step(25)
    for _ in range(2):
        away_and_back(job)
        job.go_on(15)
    elsewhere = (*CARRIED, "--own", str(place / "away-h-reference"))
    assert_same_as_untouched(job, Scenario(job.argv, 1, 1, untouched=elsewhere), references)
    own = lab.lab.directory / job_host(job) / "var-tmp" / "away-h"
    kept = sorted(path.name for path in own.iterdir())
    assert kept == ["checkpoint-890.pt", "checkpoint-900.pt", "train.log"]
    assert torch.load(own / "checkpoint-900.pt")["step"] == 900
    assert len((own / "train.log").read_text().splitlines()) == 900


def job_host(job: Job) -> str:
    """Where the first capsule is, or was at its end."""
    return job.capsule(0).host


def test_h_a_file_with_holes_in_tmp(lab: LabSession) -> None:
    """64 GB that take a few bytes."""
    job = start_with_holes(lab, "away-holes")
    away_and_back(job)
    assert_kept_holes(job)


def test_i_unprivileged_user(
    new_lab_name: Callable[[], str], open_python: OpenPython, references: References, place: Path
) -> None:
    """Their own job is theirs to suspend and to resume."""
    python = open_python.python
    shutil.copy(GPT, open_python.files)
    argv = (python, str(shutil.copy(PLAIN_GPT[1], open_python.files)), *PLAIN_GPT[2:])
    with a_lab(new_lab_name(), place, "--hosts", "4", *BRISK, python=python) as lab:
        job = lab.start("away-i", argv, nnodes=2, user=NOBODY)
        job.wait_step(10)
        away_and_back(job, user=NOBODY)
        assert {path.stat().st_uid for path in job.out.iterdir()} == {NOBODY}
        scenario = Scenario(argv, 2, 2, untouched=TRAIN_GPT)
        assert_same_as_untouched(job, scenario, references)


AWAY_S = 6.0


def test_j_kernel_objects(lab: LabSession) -> None:
    """Its monotonic clock is stopped meanwhile, and so do its timers. Its connections out of the
    job are closed (test_outside.py)."""
    job = lab.start("away-j", KERNEL_OBJECTS)
    objects = KernelJob(job, server=False)
    objects.arm()
    away_and_back(job, AWAY_S)
    objects.goes_on()
    report = objects.assert_whole(AWAY_S / 2)
    assert report["behind"] > AWAY_S, "the time of day went on"


def test_k_slow_and_lossy_link(lab: LabSession, references: References) -> None:
    job = lab.start("away-k", LONG, nnodes=2)
    job.wait_step(10)
    try:
        for host in lab.lab.hosts:
            lab.cli("lab", "link", host, "--rate", "200mbit", "--loss", "1")
        away_and_back(job)
        job.go_on(20)
    finally:
        for host in lab.lab.hosts:
            lab.cli("lab", "link", host, "--rate", "none", "--loss", "0")
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)
