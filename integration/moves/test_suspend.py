# SPDX-License-Identifier: Apache-2.0
"""A job leaves all of its hosts and comes back later, bit for bit, without a repeated step."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from reference_runs import References
from whereabouts import where

from liveshift.errors import LiveshiftError
from liveshift.launcher import lab as labs
from liveshift.runtime.messages import JobRow, ProtectionRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run the job, two may hold its image; snapshots are off."""
    return new_lab("--hosts", "4")


@pytest.fixture
def job(lab: LabSession) -> Job:
    """A DDP job of two, in training."""
    started = lab.start(f"asleep{next(_numbers)}", LONG, nnodes=2)
    started.wait_step(10)
    return started


def row(job: Job) -> JobRow:
    return next(each for each in job.session.status().jobs if each.name == job.name)


def anywhere(job: Job) -> set[str]:
    """The hosts that have a process of the job."""
    return {host for index in range(2) for host in where(job.session.lab, f"{job.name}/{index}")}


def all_up(lab: LabSession) -> bool:
    try:
        return all(host.state == "up" for host in lab.status().hosts)
    except LiveshiftError:
        return False


def numbers(job: Job, rank: int) -> list[int]:
    return [step["step"] for step in job.steps(rank)]


def protection(job: Job) -> ProtectionRow:
    found = row(job).protection
    assert found is not None
    return found


def test_it_leaves_its_hosts_and_goes_on_elsewhere(
    lab: LabSession, job: Job, references: References
) -> None:
    before = [job.seen(index) for index in range(2)]
    said = lab.json("suspend", job.name)
    assert said["state"] == "suspended"
    holders = set(said["holders"].values())
    assert holders.isdisjoint(each.host for each in before)
    assert row(job).state == "suspended"
    assert anywhere(job) == set(), "no process of it is left"
    assert protection(job).bytes > 50 << 20, "two processes with torch"
    assert {host.used for host in lab.status().hosts} == {0}, "it takes no slot"
    steps = [numbers(job, rank) for rank in range(2)]
    for host in (each.host for each in before):  # they may be switched off now
        lab.cli("drain", host)
    time.sleep(2.0)
    assert [numbers(job, rank) for rank in range(2)] == steps, "it does not train"
    assert "is suspended" in lab.refused("logs", job.name)
    assert "is suspended" in lab.refused("migrate", f"{job.name}/0")

    went = lab.json("resume", job.name)
    assert set(went["where"].values()) == holders
    after = [job.seen(index) for index in range(2)]
    assert {each.host for each in after} == holders
    assert [each.tasks.keys() for each in after] == [each.tasks.keys() for each in before]
    for each in before:
        lab.cli("uncordon", each.host)
    job.go_on(AFTER)
    for rank in range(2):
        there = numbers(job, rank)
        assert there == list(range(1, len(there) + 1)), "each step once"
    kinds = [event.kind for event in lab.history(job.name)]
    assert [k for k in kinds if k in ("suspended", "resumed")] == ["suspended", "resumed"]
    eventually(lambda: not protection(job).newest, "the image to be dropped: snapshots are off", 30)
    job.assert_begins_like_never_moved(references)


def _assert_goes_on(job: Job, steps: list[list[int]], references: References) -> None:
    """Wait until the job has trained on from ``steps``, the numbers that each rank had made."""
    job.go_on(AFTER)
    for rank in range(2):
        there = numbers(job, rank)
        assert there[: len(steps[rank])] == steps[rank]
        assert there == list(range(1, len(there) + 1)), "each step once"
    job.assert_begins_like_never_moved(references)


def _lose(lab: LabSession, job: Job, host: str) -> None:
    """Cut the power of a host that holds an image, and switch it on once other hosts have it."""
    labs.kill_host(lab.lab, host)
    eventually(lambda: lab.host(host).state == "lost", f"{host} to be missed", 20)
    assert protection(job).why_not == "", "it can be resumed"
    eventually(lambda: host not in protection(job).holders, "other hosts to have it", 30)
    lab.boot(host)


def test_it_outlives_any_host_that_holds_it(
    lab: LabSession, job: Job, references: References
) -> None:
    """One after the other: what a dead one had is copied again."""
    lab.json("suspend", job.name)
    steps = [numbers(job, rank) for rank in range(2)]
    for _ in range(3):
        eventually(lambda: not protection(job).alone, "each image to be on two hosts", 30)
        _lose(lab, job, protection(job).holders[0])
    copied = [event.text for event in lab.history(job.name) if event.kind == "copied"]
    assert len(copied) == 4, copied
    lab.json("resume", job.name)
    _assert_goes_on(job, steps, references)


@pytest.mark.long
def test_a_suspended_job_can_be_stopped(lab: LabSession, job: Job) -> None:
    lab.json("suspend", job.name)
    holder = protection(job).holders[0]
    eventually(lambda: not protection(job).alone, "each image to be on two hosts", 30)
    assert lab.json("drain", holder)["holds"] == [], "another host has it too"
    lab.cli("uncordon", holder)
    assert lab.json("stop", job.name)["state"] == "ended"
    assert anywhere(job) == set()


@pytest.mark.long
def test_an_orchestrator_that_was_restarted_resumes_it(
    lab: LabSession, job: Job, references: References
) -> None:
    lab.json("suspend", job.name)
    labs.stop_daemon(lab.lab, "ctl")
    labs.start_daemon(lab.lab, "ctl")
    eventually(lambda: all_up(lab), "the hosts to report to the orchestrator", 30)
    assert row(job).state == "suspended"
    lab.json("resume", job.name)
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


@pytest.mark.long
def test_one_that_is_saved_in_a_directory_outlives_all_hosts(
    lab: LabSession, job: Job, references: References, place: Path
) -> None:
    kept = place / "kept"
    kept.mkdir(mode=0o777)
    kept.chmod(0o777)
    refused = lab.cli("suspend", job.name, "--to", str(kept), code=1)
    assert "others than root can change" in " ".join(refused.err.split())
    assert protection(job).holders, "it is suspended in memory all the same"
    kept.chmod(0o700)
    said = lab.json("suspend", job.name, "--to", str(kept))
    assert str(kept) in said["text"]
    assert (protection(job).holders, protection(job).directory) == ([], str(kept))
    assert sum(each.stat().st_blocks for each in kept.rglob("*")) * 512 > 50 << 20
    steps = [numbers(job, rank) for rank in range(2)]
    for host in lab.lab.hosts:
        labs.kill_host(lab.lab, host)
    for host in lab.lab.hosts:
        lab.boot(host)
    lab.json("resume", job.name)
    _assert_goes_on(job, steps, references)


@pytest.mark.long
def test_one_that_cannot_be_held_trains_on(lab: LabSession) -> None:
    job = lab.start("wide", LONG, nnodes=4)
    job.wait_step(5)
    for host in lab.lab.hosts:
        lab.cli("cordon", host)
    try:
        assert "no host can hold its snapshots" in lab.refused("suspend", job.name)
    finally:
        for host in lab.lab.hosts:
            lab.cli("uncordon", host)
    job.go_on(AFTER)
    job.stop()
