# SPDX-License-Identifier: Apache-2.0
"""A job runs on all hosts of its cluster, so these hold each other's images."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, steps, wait_past, wait_protected, wait_rewound, wait_steps
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SNAPSHOTS = "every=2"


def holders(job: Job) -> list[str]:
    row = job.protection()
    return [] if row.why_not else row.holders


def waits(job: Job, times: int) -> bool:
    """Whether the job has waited so many times for a host."""
    return sum("no host has room" in e.text for e in events(job, "rewinding")) == times


def test_a_host_is_lost_and_comes_back(new_lab: NewLab, references: References) -> None:
    """Each host has one slot. So the job waits for the host that was lost, which has lost its
    memory, and goes on there from the other host's image. Then the other host is lost."""
    lab = new_lab("--hosts", "2", "--slots", "1", "--snapshots", SNAPSHOTS)
    job = lab.start("everywhere", (*LONG, "--say"), nnodes=2)
    job.wait_step(10)
    eventually(lambda: holders(job) == ["h0", "h1"], "the hosts to hold each other's images", 60)
    for count, rank in ((1, 1), (2, 0)):
        wait_protected(job)
        victim, survivor = job.seen(rank).host, job.seen(1 - rank).host
        before = len(steps(job, 1 - rank))
        labs.kill_host(lab.lab, victim)
        eventually(partial(waits, job, count), "the job to wait for a host", 60)
        lab.boot(victim)
        wait_rewound(job, count)
        wait_steps(job, time.time(), AFTER)
        assert (job.seen(rank).host, job.seen(1 - rank).host) == (victim, survivor)
        eventually(lambda: holders(job) == ["h0", "h1"], "both to hold images again", 60)
    back = [event.text for event in events(job, "rewinding") if "goes back" in event.text]
    assert all("came back without" in text for text in back), "no rank is to blame"
    wait_past(job, before)
    job.assert_begins_like_never_moved(references)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("nnodes", [2, 3])
def test_hosts_are_lost_at_random_moments(
    new_lab: NewLab, references: References, nnodes: int, seed: int
) -> None:
    """Some while a snapshot is taken. Agents are restarted in between. A host that is back within a
    second has not been missed, and what ran there counts as killed (max_rewinds): in a lab no host
    boots by itself, and so no boot shows."""
    often = ("--snapshots", "every=1,max_rewinds=100", "--timeouts", "suspicion=1")
    lab = new_lab("--hosts", str(nnodes), "--slots", "1", *often)
    job = lab.start(f"everywhere{nnodes}-{seed}", LONG, nnodes=nnodes)
    job.wait_step(10)
    hosts, chance = sorted(lab.lab.hosts), random.Random(seed)
    eventually(lambda: holders(job) == hosts, "the hosts to hold each other's images", 60)
    for count in range(1, 9):
        victim, other = chance.sample(hosts, 2)
        time.sleep(chance.uniform(0, 3))
        if chance.random() < 0.3:
            lab.stop_agent(other)
            lab.start_agent(other)
        labs.kill_host(lab.lab, victim)
        time.sleep(chance.uniform(0, 4))
        lab.boot(victim)
        wait_rewound(job, count)
        wait_protected(job)
        assert job.protection().holders == hosts
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


@pytest.fixture(scope="module")
def unprotected(new_lab: NewLab) -> LabSession:
    """Two hosts, and no snapshots but those that a person orders."""
    return new_lab("--hosts", "2", "--slots", "1", "--snapshots", "every=off")


def a_directory(job: Job) -> Path:
    made = job.out / "saved"
    made.mkdir(mode=0o700)
    return made


def test_it_is_saved_and_outlives_all_machines(
    unprotected: LabSession, references: References
) -> None:
    """All hosts lose their power, and the orchestrator is restarted."""
    lab = unprotected
    job = lab.start("parked", LONG, nnodes=2)
    job.wait_step(10)
    saved = a_directory(job)
    assert lab.json("suspend", job.name, "--to", str(saved))["state"] == "suspended"
    assert [lab.host(name).capsules for name in ("h0", "h1")] == [[], []]
    assert (job.protection().holders, job.protection().directory) == ([], str(saved))
    for host in lab.lab.hosts:
        labs.kill_host(lab.lab, host)
    labs.stop_daemon(lab.lab, "ctl")
    labs.start_daemon(lab.lab, "ctl")
    for host in lab.lab.hosts:
        lab.boot(host)
    eventually(lambda: all(lab.host(h).state == "up" for h in lab.lab.hosts), "all hosts", 30)
    lab.json("resume", job.name, "--from", str(saved))
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


def test_a_job_on_the_only_host_is_saved_and_trains_on(
    unprotected: LabSession, references: References
) -> None:
    lab = unprotected
    job = lab.start("alone", LONG)
    job.wait_step(10)
    (other,) = {"h0", "h1"} - {job.seen(0).host}
    lab.cli("cordon", other)
    try:
        saved = a_directory(job)
        assert "no host can hold" in lab.refused("suspend", job.name)
        said = lab.json("snapshot", job.name, "--to", str(saved))
        assert str(saved) in said["text"]
        assert job.protection().holders == [], "its host has its memory back"
        job.go_on(AFTER)
        lab.json("stop", job.name)
        lab.json("resume", job.name, "--from", str(saved))
        job.go_on(AFTER)
    finally:
        lab.cli("uncordon", other)
    assert len(list(saved.rglob("*"))) > 2
    job.assert_begins_like_never_moved(references)
