# SPDX-License-Identifier: Apache-2.0
"""A job that was moved computes what it would have computed anyway, to the last bit.

The scenarios (a) to (k) of the project's main promise, one test each. Every one asserts that the
processes really ran on the new host (whereabouts.py), that they trained before the move and went
on after it, and that all losses and the final parameters equal those of the same command run
without liveshift (where only Python starts the ranks, of the same run under torchrun).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from chain_job import assert_kept_holes, start_with_holes
from kernel_job import KERNEL_OBJECTS, KernelJob, counting_server
from lab_session import (
    BRISK,
    GPT,
    LONG,
    TORCHRUN,
    LabSession,
    NewLab,
    a_lab,
    eventually,
)
from moving_job import AFTER, Job
from open_python import NOBODY, OpenPython
from reference_runs import References
from scenarios import CARRIED, FSDP, LOADER, PLAIN_GPT, TRAIN_GPT

from liveshift.interposer.library import library_path
from liveshift.launcher import demo
from liveshift.launcher.client.client import Client
from liveshift.launcher.report import gaps

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

GPT_OF = (str(GPT), "--batch", "8", "--out", "{out}", "--steps")


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Four hosts for one capsule each: a job of two has two spares."""
    return new_lab("--hosts", "4")


def a_gpt(lab: LabSession, name: str, argv: Sequence[str]) -> Job:
    """The GPT on h0 and h1, in training."""
    job = lab.start(name, argv, nnodes=2)
    job.wait_step(10)
    return job


def without_end(lab: LabSession, name: str) -> Job:
    """A smaller DDP job on h0 and h1, in training until it is told that it is enough."""
    job = lab.start(name, LONG, nnodes=2)
    job.wait_step(10)
    return job


def assert_trained_as_never_moved(job: Job, references: References) -> None:
    """End such a job; each step's loss and parameters are those of a run without liveshift."""
    job.go_on(AFTER)
    job.assert_trained_across(2)
    job.assert_quiesced(communicates=True)
    job.assert_begins_like_never_moved(references)


@pytest.mark.long
def test_a_rank_1_of_ddp_moves(lab: LabSession, references: References) -> None:
    gpt = a_gpt(lab, "a-gpt", TRAIN_GPT)
    row = gpt.drained(1, verb="taint")
    lab.cli("untaint", "host", "h1")
    assert (row.source, row.by) == ("h1", "root")
    gpt.assert_same_as_never_moved(references, ranks=2)


def test_b_rank_0_moves_with_rendezvous_and_store(lab: LabSession, references: References) -> None:
    gpt = a_gpt(lab, "b-gpt", TRAIN_GPT)
    eventually(lambda: gpt.capsule(0).ranks == [0], "rank 0 to be told of in a beat", 10)
    gpt.migrate(0)
    gpt.assert_same_as_never_moved(references, ranks=2)


@pytest.mark.long
def test_a_job_that_a_file_ends_some_steps_after_its_move(lab: LabSession) -> None:
    """As `make demo` does it: who began it cannot know when the move will be over."""
    stop = lab.place / "stop"
    small = ("--block", "32", "--stop-file", str(stop))
    argv = (*TORCHRUN, *GPT_OF, str(demo.STEPS), *small)
    gpt = a_gpt(lab, "stopped-gpt", argv)
    row = gpt.migrate(1)
    last = max(len(gpt.steps(rank)) for rank in range(2)) + 2 * AFTER
    stop.with_suffix(".new").write_text(f"{last}\n")
    stop.with_suffix(".new").rename(stop)
    with Client(lab.lab.socket) as client:
        watched = demo.Watched(client, gpt.name)
        watched._places = {f"{gpt.name}/{n}": gpt.seen(n).host for n in range(2)}
        watched._find()
    assert watched.found == [{0: gpt.seen(0).host, 1: row.destination}]
    result = gpt.result(2)
    gpt.assert_trained_across(2)
    assert [len(gpt.steps(rank)) for rank in range(2)] == [last, last]
    assert result.digests[0] == result.digests[1], "both ranks end with the same parameters"
    times = [step["time"] for step in gpt.steps(1)]
    assert gaps.doubts(times, row.phases, row.asked, AFTER) == []


def test_c_two_ranks_with_dataloader_workers(lab: LabSession, references: References) -> None:
    job = lab.start("c-loader", LOADER)
    job.wait_step(50)  # in the second epoch
    processes = 1 + 2 + 2 + 2
    assert len(job.seen(0).tasks) == processes, "torchrun, ranks, two workers, one with its tracker"
    job.migrate(0)
    job.assert_same_as_never_moved(references, ranks=2)


@pytest.mark.long
def test_d_moved_twice_and_back(lab: LabSession, references: References) -> None:
    job = without_end(lab, "d-ddp")
    home = job.seen(1).host
    for to in ("h2", "h3", home):
        job.migrate(1, to)
        job.go_on(3)
    assert job.seen(1).host == home
    assert job.capsule(1).epoch == 4
    assert_trained_as_never_moved(job, references)


@pytest.mark.long
def test_e_both_hosts_drained(lab: LabSession, references: References) -> None:
    job = without_end(lab, "e-ddp")
    first, second = job.seen(0).host, job.seen(1).host
    try:
        job.drained(0)
        job.go_on(3)
        job.drained(1)
        empty = {row.name: row.capsules for row in lab.status().hosts}
        assert empty[first] == empty[second] == []
        assert_trained_as_never_moved(job, references)
    finally:
        for host in (first, second):
            lab.cli("uncordon", host)


@pytest.mark.long
def test_f_plain_python_under_rank(lab: LabSession, references: References) -> None:
    """As in (i), as root."""
    job = a_gpt(lab, "f-plain", PLAIN_GPT)
    job.migrate(0)
    job.assert_same_as_never_moved(references, ranks=2, argv=TRAIN_GPT)


@pytest.mark.long
def test_g_fsdp2_on_cpu(lab: LabSession, references: References) -> None:
    job = lab.start("g-fsdp", FSDP, nnodes=2)
    job.wait_step(10)
    job.migrate(1)
    job.assert_same_as_never_moved(references, ranks=2)


@pytest.mark.long
def test_h_log_and_checkpoints_on_a_carried_path(
    lab: LabSession, references: References, place: Path
) -> None:
    job = lab.start("h-carried", (*CARRIED, "--own", "/var/tmp/h-carried"))
    job.wait_step(25)
    source = job.seen(0).host
    own = {h: lab.lab.directory / h / "var-tmp" / "h-carried" for h in lab.lab.hosts}
    assert [host for host, path in own.items() if path.exists()] == [source]
    row = job.migrate(0)
    job.wait_step(60)
    there = own[row.destination]
    lines = (there / "train.log").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 60
    back = job.migrate(0, to=source)  # and home again, to where old copies of the files lie
    job.go_on(5)
    assert back.destination == source
    elsewhere = (*CARRIED, "--own", str(place / "h-carried-reference"))
    job.assert_same_as_never_moved(references, ranks=1, argv=elsewhere)
    kept = sorted(path.name for path in own[source].iterdir())
    assert kept == ["checkpoint-890.pt", "checkpoint-900.pt", "train.log"]
    assert torch.load(own[source] / "checkpoint-900.pt")["step"] == 900
    assert len((own[source] / "train.log").read_text().splitlines()) == 900


@pytest.mark.long
def test_h_a_file_with_holes_in_tmp(lab: LabSession) -> None:
    """64 GB that take a few bytes: they are neither sent nor written."""
    job = start_with_holes(lab, "h-holes")
    plan = lab.json("migrate", job.name + "/0", "--dry-run")
    assert "GB" not in dict(plan["checks"])["files along"]
    assert plan["carried_bytes"] < 20 << 20, "what other jobs have carried, too"
    row = job.migrate(0)
    assert row.bytes < 200 << 20
    assert job.capsule(0).host == row.destination
    assert_kept_holes(job)


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_i_unprivileged_user(
    new_lab_name: Callable[[], str], open_python: OpenPython, references: References, place: Path
) -> None:
    python = open_python.python
    shutil.copy(GPT, open_python.files)
    argv = (python, str(shutil.copy(PLAIN_GPT[1], open_python.files)), *PLAIN_GPT[2:])
    with a_lab(new_lab_name(), place, "--hosts", "3", *BRISK, python=python) as lab:
        job = lab.start("i-nobody", argv, nnodes=2, user=NOBODY)
        job.wait_step(10)
        assert job.seen(1).users == {NOBODY}
        assert job.capsule(1).host == "h1"
        job.migrate(1, to="h2", user=NOBODY)  # their own job is theirs to move
        assert job.seen(1).users == {NOBODY}
        assert {path.stat().st_uid for path in job.out.iterdir()} == {NOBODY}
        job.go_on(AFTER)
        interposer = library_path()
        new = interposer.with_suffix(".new")
        shutil.copy2(interposer, new)
        new.rename(interposer)  # as an upgrade does, in a directory that is root's
        lost = f"/{interposer.name} (deleted)\n"
        assert all(lost in maps_of(pid) for pid in job.seen(1).tasks.values())
        job.migrate(1, to="h1", user=NOBODY)
        assert all(lost in maps_of(pid) for pid in job.seen(1).tasks.values())
        job.assert_same_as_never_moved(references, ranks=2, argv=TRAIN_GPT)


def test_j_kernel_objects_and_a_connection(lab: LabSession, place: Path) -> None:
    with counting_server(lab, "h0", place / "j-server.json") as server:
        lab.cli("taint", "h0", "--reason", "the server is there")
        job = lab.start("j-objects", (*KERNEL_OBJECTS, "--server", server))
        lab.cli("untaint", "h0")
        objects = KernelJob(job, server=True)
        objects.arm()
        row = job.migrate(0, to="h3")
        objects.goes_on()
        report = objects.assert_whole(row.frozen_s)
    assert report["behind"] <= row.frozen_s + 0.05, "the two clocks went apart"


@pytest.mark.long
def test_k_slow_and_lossy_link(lab: LabSession, references: References) -> None:
    job = without_end(lab, "k-link")
    hosts = ("h1", "h2")
    try:
        for host in hosts:
            lab.cli("lab", "link", host, "--rate", "200mbit", "--loss", "1")
        row = job.migrate(1, to="h2")
        (ahead,) = (phase for phase in row.phases if phase.name == "pre-copy")
        assert (ahead.bytes or 0) > 50e6, ahead
        assert ahead.seconds > 1, "memory went over a slow link, compressed perhaps"
        job.go_on(20)
    finally:
        for host in hosts:
            lab.cli("lab", "link", host, "--rate", "none", "--loss", "0")
    assert_trained_as_never_moved(job, references)
