# SPDX-License-Identifier: Apache-2.0
"""Hosts die at random moments, and the job computes what it would have computed anyway.

Each moment is drawn from a seed: when, and which host; one that runs a rank, or one that holds the
images. A host whose power is cut comes back before the next one dies, and the job is protected
then. So no moment is safe: the job trains, or a snapshot is being taken, is complete, or is
replaced.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_job import assert_kept_holes, start_with_holes
from kernel_job import KERNEL_OBJECTS, KernelJob
from lab_session import (
    BRISK,
    GPT,
    JOBS,
    LONG,
    TORCHRUN,
    LabSession,
    NewLab,
    a_lab,
    eventually,
)
from moving_job import AFTER, Job
from open_python import NOBODY, OpenPython
from protected_job import events, wait_protected
from reference_runs import References
from scenarios import CARRIED, PACED_GPT, SMALL_GPT, Scenario

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab]

EVERY_S = 1.0
OFTEN = ("--hosts", "4", "--snapshots", f"every={EVERY_S:g}", "--timeouts", "suspicion=1")
SHORT, LONG_FORM = 6, 50
"""How many moments `make test` has, and how many all tests here have at least."""

MARGIN = 100
"""A job makes so many steps after its last loss. That is more than a rank can make before it reads
the file that ends the job."""

DDP = Scenario(LONG, 2, 2, ends=False)
ENDLESS = ("--steps", "20000", "--pace", "0.1", "--out", "{out}")
SCENARIOS = {
    "torchrun": (*TORCHRUN, *SMALL_GPT, "20000"),
    "plain-python": ("python", *SMALL_GPT, "20000"),
    "fsdp": (*TORCHRUN, str(JOBS / "fsdp.py"), *ENDLESS),
    "workers": (*TORCHRUN, str(JOBS / "loader.py"), *ENDLESS, "--contexts", "fork", "spawn"),
}
"""Of test_bit_exact.py. They go on until a file says after which step they end."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """At most two hosts run the job, the others may hold its images."""
    return new_lab(*OFTEN)


@pytest.fixture(autouse=True)
def tidy(lab: LabSession) -> Iterator[None]:
    """A test that fails leaves the next one a lab without jobs, and with all hosts."""
    yield
    for host in lab.lab.hosts:  # first: a job does not end while a host of it is off
        if lab.lab.machine(host).init is None:
            lab.boot(host)
    for job in lab.jobs:
        if job.code() is None:
            lab.cli("stop", job.name)


def lose(job: Job, chance: random.Random) -> None:
    """Cut the power of a host at a random moment. Return when the host is back, and the job is
    protected and trains."""
    lab, before = job.session, len(events(job, "rewound"))
    runs = {job.capsule(index).host for index in range(job.nnodes)}
    victim = chance.choice(sorted(runs | set(job.protection().holders)))
    time.sleep(chance.uniform(0, 2 * EVERY_S))
    labs.kill_host(lab.lab, victim)
    print(f"{job.name}: {victim} dies, which {'runs it' if victim in runs else 'holds images'}")
    if runs == {victim}:  # no other host can show that the job does not train, cut off from us
        lab.boot(victim)
    if victim in runs:
        eventually(lambda: len(events(job, "rewound")) > before, "the job to run again")
    if runs != {victim}:
        lab.boot(victim)
    wait_protected(job)


def end_after(job: Job, stop: Path, steps: int) -> int:
    """Let the job end so many steps from now. Returns which step will be its last. The untouched
    run of the same command finds the file from the beginning."""
    last = max(len(job.steps(rank)) for rank in range(job.nnodes)) + steps
    stop.with_suffix(".new").write_text(f"{last}\n")
    stop.with_suffix(".new").rename(stop)
    return last


def finish(job: Job, scenario: Scenario, references: References) -> None:
    """End the job; all that it has computed is what the same command computes untouched."""
    if scenario.ends:
        result = job.result(scenario.ranks)
        untouched = scenario.untouched or scenario.argv
        result.assert_equals(references.of(untouched, scenario.nnodes, scenario.ranks))
    else:
        job.go_on(AFTER)
        job.assert_begins_like_never_moved(references)


def play(
    lab: LabSession,
    name: str,
    scenario: Scenario,
    moments: int,
    seed: int,
    references: References,
    user: int | None = None,
) -> None:
    finish(lose_some(lab, name, scenario, moments, seed, user), scenario, references)


def lose_some(
    lab: LabSession,
    name: str,
    scenario: Scenario,
    moments: int,
    seed: int,
    user: int | None = None,
) -> Job:
    """A job that trains yet when it has lost so many hosts."""
    job = lab.start(name, scenario.argv, nnodes=scenario.nnodes, user=user)
    job.wait_step(10)
    wait_protected(job)
    chance = random.Random(seed)
    for _ in range(moments):
        lose(job, chance)
    assert job.code() is None, "all moments lay within its training"
    return job


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))])
def test_hosts_die_at_random_moments(lab: LabSession, references: References, seed: int) -> None:
    play(lab, f"unlucky{seed}", DDP, SHORT, seed, references)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", SCENARIOS)
def test_hosts_of_other_jobs_die_at_random_moments(
    lab: LabSession, references: References, kind: str, seed: int
) -> None:
    stop = lab.place / f"stop-{kind}{seed}"
    scenario = Scenario((*SCENARIOS[kind], "--stop-file", str(stop)), 2, 2)
    job = lose_some(lab, f"{kind}{seed}", scenario, 4, seed)
    last = end_after(job, stop, MARGIN)
    finish(job, scenario, references)
    assert [len(job.steps(rank)) for rank in range(2)] == [last, last]


FEW = 3
"""Moments of each further scenario of test_bit_exact.py."""


def meanwhile(job: Job, chance: random.Random, *words: str) -> None:
    """Cut the power of a random host while a command moves the job, or just before or after. The
    host comes back, and the job is protected and trains."""
    lab = job.session
    with lab.popen(*words) as moving:
        time.sleep(chance.uniform(0, 2 * EVERY_S))
        victim = chance.choice(sorted(lab.lab.hosts))
        labs.kill_host(lab.lab, victim)
        print(f"{job.name}: {victim} dies during {' '.join(words)}")
        time.sleep(chance.uniform(0, 2 * EVERY_S))
        lab.boot(victim)
        said = moving.communicate(timeout=120)
        print(moving.returncode, *(each.decode() for each in said))
    wait_protected(job)
    job.go_on(AFTER)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_d_e_hosts_die_while_the_job_is_moved_or_its_hosts_are_drained(
    lab: LabSession, references: References
) -> None:
    job = lab.start("restless", LONG, nnodes=2)
    job.wait_step(10)
    wait_protected(job)
    chance = random.Random(11)
    for number in range(2 * FEW):
        rank = number % 2
        if number < FEW:
            meanwhile(job, chance, "migrate", f"{job.name}/{rank}")
        else:
            host = job.capsule(rank).host
            meanwhile(job, chance, "drain", host)
            lab.cli("uncordon", host)
    assert events(job, "rewound"), "a host that ran it was among them"
    finish(job, DDP, references)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_that_a_file_ends_some_steps_after_a_loss(
    lab: LabSession, references: References
) -> None:
    stop = lab.place / "unlucky-stop"
    argv = (*TORCHRUN, *PACED_GPT, "--out", "{out}", "--steps", "600", "--stop-file", str(stop))
    job = lab.start("unlucky-a", argv, nnodes=2)
    job.wait_step(10)
    wait_protected(job)
    chance = random.Random(16)
    for _ in range(FEW):
        lose(job, chance)
    last = end_after(job, stop, 2 * AFTER)
    finish(job, Scenario(argv, 2, 2), references)
    assert [len(job.steps(rank)) for rank in range(2)] == [last, last]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_h_log_and_checkpoints_on_a_carried_path(
    lab: LabSession, references: References, place: Path
) -> None:
    """Two ranks, and each host that comes back has the files of before."""
    own = "/var/tmp/unlucky-h"
    untouched = (*CARRIED, "--own", str(place / "unlucky-h-reference-RANK"))
    slow = (*CARRIED, "--pace", "0.2", "--own", own)  # three minutes, unless it is hurried
    scenario = Scenario(slow, 2, 2, untouched=untouched)
    play(lab, "unlucky-h", scenario, FEW, 12, references)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_h_a_file_with_holes_in_tmp(lab: LabSession) -> None:
    """64 GB that take a few bytes. Its only host comes back each time, with the file as it was."""
    job = start_with_holes(lab, "unlucky-holes")
    wait_protected(job)
    chance = random.Random(17)
    for _ in range(FEW):
        lose(job, chance)
    assert_kept_holes(job)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_i_unprivileged_user(
    new_lab_name: Callable[[], str], open_python: OpenPython, references: References, place: Path
) -> None:
    files = open_python.files
    shutil.copy(PACED_GPT[0], files)
    shutil.copy(GPT, files)
    paced = (str(files / Path(PACED_GPT[0]).name), *PACED_GPT[1:], "--out", "{out}")
    argv = (open_python.python, *paced, "--steps", "600")
    untouched = (*TORCHRUN, *PACED_GPT, "--out", "{out}", "--steps", "600")
    scenario = Scenario(argv, 2, 2, untouched=untouched)
    name = new_lab_name()
    with a_lab(name, place, *OFTEN, *BRISK, python=open_python.python) as lab:
        play(lab, "unlucky-i", scenario, FEW, 13, references, user=NOBODY)
        out = lab.jobs[-1].out
        theirs = [path for path in out.iterdir() if path.name != "hurry"]  # which is the test's
        assert {path.stat().st_uid for path in theirs} == {NOBODY}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_j_kernel_objects(lab: LabSession) -> None:
    """Its timers are armed at a random moment too, and so perhaps twice."""
    job = lab.start("unlucky-j", KERNEL_OBJECTS)
    objects = KernelJob(job, server=False)
    wait_protected(job)
    chance = random.Random(14)
    lose(job, chance)
    objects.arm()
    for _ in range(FEW - 1):
        lose(job, chance)
    objects.goes_on()
    objects.assert_whole(stood_s=2.0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_k_slow_and_lossy_link(lab: LabSession, references: References) -> None:
    try:
        for host in lab.lab.hosts:
            lab.cli("lab", "link", host, "--rate", "200mbit", "--loss", "1")
        play(lab, "unlucky-k", DDP, FEW, 15, references)
    finally:
        for host in lab.lab.hosts:
            lab.cli("lab", "link", host, "--rate", "none", "--loss", "0")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_is_suspended_at_random_moments_and_its_hosts_die_meanwhile(
    lab: LabSession, references: References
) -> None:
    """Hosts that ran it die while it runs nowhere, and it goes on elsewhere."""
    job = lab.start("sleeper", LONG, nnodes=2)
    job.wait_step(10)
    chance = random.Random(7)
    for _ in range(SHORT):
        time.sleep(chance.uniform(0, 2 * EVERY_S))
        runs = [job.capsule(index).host for index in range(2)]
        lab.json("suspend", job.name)
        victim = chance.choice(runs)
        labs.kill_host(lab.lab, victim)
        lab.json("resume", job.name)
        lab.boot(victim)
        job.go_on(AFTER)
    finish(job, DDP, references)


def test_there_are_as_many_moments_as_promised() -> None:
    ddp, others, further = 4 * SHORT, len(SCENARIOS) * 2 * 4, 8 * FEW
    assert ddp + others + further + SHORT >= LONG_FORM
