# SPDX-License-Identifier: Apache-2.0
"""Hosts die at random moments, and the job computes what it would have computed anyway.

Each moment is drawn from a seed: when, and which host; one that runs a rank, or one that holds the
images. A host whose power is cut comes back before the next one dies, and the job is protected
then. So no moment is safe: the job trains, or a snapshot is being taken, is complete, or is
replaced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from lab_session import GPT, JOBS, LONG, TORCHRUN, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, wait_protected
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab]

EVERY_S = 1.0
SHORT, LONG_FORM = 6, 50
"""How many moments `make test` has, and how many all tests here have at least."""

SMALL_GPT = (str(GPT), "--batch", "8", "--block", "32", "--out", "{out}", "--steps")


@dataclass(frozen=True)
class Scenario:
    """``ranks``: of all capsules. ``ends``: after so many steps, which it takes minutes for."""

    argv: Sequence[str]
    nnodes: int
    ranks: int
    ends: bool = True


DDP = Scenario(LONG, 2, 2, ends=False)
SCENARIOS = {
    "torchrun": Scenario((*TORCHRUN, *SMALL_GPT, "600"), 2, 2),
    "plain-python": Scenario(("python", *SMALL_GPT, "600"), 2, 2),
    "fsdp": Scenario(
        (*TORCHRUN, str(JOBS / "fsdp.py"), "--steps", "800", "--pace", "0.1", "--out", "{out}"),
        2,
        2,
    ),
    "workers": Scenario(
        (
            *(*TORCHRUN, str(JOBS / "loader.py"), "--steps", "800", "--pace", "0.1"),
            *("--out", "{out}", "--contexts", "fork", "spawn"),
        ),
        2,
        2,
    ),
}
"""Of test_bit_exact.py, long enough that some hosts may die."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """At most two hosts run the job, the others may hold its images."""
    return new_lab("--hosts", "4", "--snapshots", f"every={EVERY_S:g}", "--timeouts", "suspicion=1")


def lose(job: Job, chance: random.Random) -> None:
    """Cut the power of a host at a random moment. Return when the host is back, and the job is
    protected and trains."""
    lab, before = job.session, len(events(job, "rewound"))
    runs = {job.capsule(index).host for index in range(job.nnodes)}
    victim = chance.choice(sorted(runs | set(job.protection().holders)))
    time.sleep(chance.uniform(0, 2 * EVERY_S))
    labs.kill_host(lab.lab, victim)
    print(f"{job.name}: {victim} dies, which {'runs it' if victim in runs else 'holds images'}")
    if victim in runs:
        eventually(lambda: len(events(job, "rewound")) > before, "the job to run again")
    lab.boot(victim)
    wait_protected(job)


def finish(job: Job, scenario: Scenario, references: References) -> None:
    """End the job; all that it has computed is what the same command computes untouched."""
    if scenario.ends:
        result = job.result(scenario.ranks)
        result.assert_equals(references.of(scenario.argv, scenario.nnodes, scenario.ranks))
    else:
        job.go_on(AFTER)
        job.assert_begins_like_never_moved(references)


def play(
    lab: LabSession, name: str, scenario: Scenario, moments: int, seed: int, references: References
) -> None:
    job = lab.start(name, scenario.argv, nnodes=scenario.nnodes)
    job.wait_step(10)
    wait_protected(job)
    chance = random.Random(seed)
    for _ in range(moments):
        lose(job, chance)
    assert job.code() is None, "all moments lay within its training"
    finish(job, scenario, references)


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
    play(lab, f"{kind}{seed}", SCENARIOS[kind], 4, seed, references)


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
    ddp, others = 4 * SHORT, len(SCENARIOS) * 2 * 4
    assert ddp + others + SHORT >= LONG_FORM
