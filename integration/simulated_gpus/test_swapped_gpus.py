# SPDX-License-Identifier: Apache-2.0
"""Ranks leave one GPU of their host for another one, as ``liveshift migrate --to-gpu`` does it.

On the doubles (gpu_lab.py); the agents, their helpers and the daemons' network are real. Each job's
losses, and at its end each byte of its device memory, are those of a run without liveshift.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fault_matrix.held import Held, holding
from gpu_lab import MIB, GpuLab, gpu_lab, gpu_references
from held_moves import HASTY, held_at, interrupted
from lab_session import NewLab, eventually
from moving_job import Job
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.messages import MigrationRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

GPUS = {"h0": (1024, 1024, 1024), "h1": (1024, 1024, 1024)}
OPTIONS = ("--slots", "3", *HASTY)
KILLED = 137
PHASES = ["prepare", "quiesce", "gpu save", "gpu restore", "reopen", "resume"]

LEFT = 24 * MIB
"""What somebody leaves of a GPU: too little for device_train.py."""


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "swap-faultpoints") as made:
        yield made


@pytest.fixture(scope="module")
def fast(new_lab: NewLab, place: Path, points: Held) -> GpuLab:
    """Two hosts that take the fast path."""
    return gpu_lab(new_lab, place, GPUS, *OPTIONS)


@pytest.fixture(scope="module")
def plain(new_lab: NewLab, place: Path, points: Held) -> GpuLab:
    """One that is told not to."""
    off = ("--gpu", "fast_path=off,verify=off")
    return gpu_lab(new_lab, place, {"h0": GPUS["h0"]}, *off, *OPTIONS)


@pytest.fixture(scope="module")
def references(place: Path) -> References:
    return gpu_references(place)


def swap(
    lab: GpuLab, job: Job, index: int, to: str, *more: str, rank: int | None = None
) -> MigrationRow:
    """Bring a capsule's rank to another GPU of its host; its processes are the very same."""
    rank = index if rank is None else rank
    before, left = job.seen(index), lab.where(job, rank)
    words = ["migrate", f"{job.name}/{index}", "--to-gpu", to, *more]
    row = msgspec.convert(lab.session.json(*words), MigrationRow)
    assert (row.state, row.error, row.kind) == ("done", None, "swap"), row
    assert job.seen(index) == before
    assert [phase.name for phase in row.phases if phase.name != "gpu memory"] == PHASES
    job.go_on(3, rank)
    now = lab.where(job, rank)
    assert now != left
    assert now == lab.gpus[before.host][int(row.destination.rpartition(" ")[2])]
    assert row.source == f"{before.host} GPU {lab.gpus[before.host].index(left)}"
    return row


def wait_used(lab: GpuLab, job: Job) -> None:
    """Of its host's GPUs only those in use by the job hold anything, soon."""
    host = job.seen(0).host

    def others_are_empty() -> bool:
        ours = {lab.where(job, rank) for rank in range(job.nnodes)}
        return not any(size for gpu, size in lab.used(host).items() if gpu not in ours)

    eventually(others_are_empty, "the GPU that was left to be empty", 20)


def test_off_a_gpu_and_back_again(fast: GpuLab, references: References) -> None:
    job = fast.start("off")
    host = job.seen(0).host
    for to in (f"{host}/2", "1", fast.gpus[host][0]):
        row = swap(fast, job, 0, to)
        assert any("allocations from GPU to GPU" in phase.detail for phase in row.phases), row
        wait_used(fast, job)
    told = fast.session.cli("events", "off").out
    assert re.search(rf"{host} GPU 0 → {host} GPU 2: paused", " ".join(told.split()))
    fast.assert_whole(job, references)


def test_by_the_driver_alone(plain: GpuLab, references: References) -> None:
    job = plain.start("alone")
    row = swap(plain, job, 0, "2")
    assert any("driver's own checkpoint" in phase.detail for phase in row.phases)
    wait_used(plain, job)
    plain.assert_whole(job, references)


@pytest.mark.long
def test_ranks_that_talk_by_nccl(fast: GpuLab, references: References) -> None:
    """The communicators are made anew on the other GPU."""
    job = fast.start("pair", nnodes=2)
    for index in (0, 1):
        row = swap(fast, job, index, "2")
        detail = {phase.name: phase.detail for phase in row.phases}
        assert re.match(r"paused after collective \d+ of nccl", detail["quiesce"]), detail
        assert re.match(r"1 communicators? rebuilt", detail["reopen"]), detail
    fast.assert_whole(job, references, ranks=2)


@pytest.mark.long
def test_one_of_two_processes_of_a_capsule(fast: GpuLab, references: References) -> None:
    """The other one is not even asked to stop for it."""
    job = fast.start("tree", ranks=2)
    host = job.seen(0).host
    said = fast.session.refused("migrate", "tree/0", "--to-gpu", "2")
    assert "say which to leave" in said
    row = swap(fast, job, 0, "2", "--from-gpu", "1", rank=1)
    assert "1 CUDA process" in {phase.name: phase.detail for phase in row.phases}["prepare"]
    assert fast.where(job, 0) == fast.gpus[host][0]
    said = fast.session.refused("migrate", "tree/0", "--to-gpu", "1", "--from-gpu", "1")
    assert "has nothing on GPU 1" in said
    fast.assert_whole(job, references, ranks=2)


@pytest.mark.long
def test_a_certain_gpu_of_another_host(fast: GpuLab, references: References) -> None:
    job = fast.start("far")
    source = job.seen(0).host
    other = next(name for name in fast.gpus if name != source)
    words = ["migrate", "far/0", "--to-gpu", f"{other}/1"]
    row = msgspec.convert(fast.session.json(*words), MigrationRow)
    assert (row.state, row.kind, row.destination) == ("done", "move", other), row
    job.go_on(3)
    assert fast.where(job) == fast.gpus[other][1]
    fast.assert_whole(job, references)


# ---- what is refused, and what fails: it goes on where it was ----


@pytest.fixture(scope="module")
def long_job(fast: GpuLab) -> Job:
    return fast.start("long")


@pytest.fixture
def long(fast: GpuLab, points: Held, long_job: Job) -> Iterator[Job]:
    """A job that lives through what follows; whatever the test did, it goes on afterwards."""
    yield long_job
    points.clear()
    long_job.go_on(2)
    wait_used(fast, long_job)


def free_gpu(fast: GpuLab, job: Job) -> str:
    host = job.seen(0).host
    return str(next(n for n, gpu in enumerate(fast.gpus[host]) if gpu != fast.where(job)))


def refused(fast: GpuLab, job: Job, *words: str, code: int = 5) -> str:
    """The command fails, and nothing is frozen for it; what was said."""
    said = fast.session.refused("migrate", f"{job.name}/0", *words, code=code)
    assert not job.migrations()[-1].frozen_s
    return said


def test_refusals(fast: GpuLab, long: Job) -> None:
    before, gpu, host = long.seen(0), fast.where(long), long.seen(0).host
    other = next(name for name in fast.gpus if name != host)
    here = fast.gpus[host].index(fast.where(long))
    for words, code, said in (
        (["--to-gpu", str(here)], 5, "already"),
        (["--to-gpu", "7"], 4, f'{host} has no GPU "7"'),
        (["--to-gpu", "h9/1"], 4, 'no host "h9"'),
        (["--to-gpu", f"{other}/7"], 4, f'{other} has no GPU "7"'),
        (["--to-gpu", free_gpu(fast, long), "--to", other], 2, "--to-gpu says which host"),
    ):
        assert said in refused(fast, long, *words, code=code)
    to = free_gpu(fast, long)
    with fast.occupied(host, LEFT, fast.gpus[host][int(to)]):
        said = refused(fast, long, "--to-gpu", to)
    assert re.search(r"[MG]B free", said)
    long.go_on(2)
    assert (long.seen(0), fast.where(long)) == (before, gpu)


def test_the_plan(fast: GpuLab, long: Job) -> None:
    host, to = long.seen(0).host, free_gpu(fast, long)
    count = len(long.migrations())
    plan = fast.session.json("migrate", "long/0", "--to-gpu", to, "--dry-run")
    assert plan["destination"] == f"{host} GPU {to}"
    rows = dict(plan["checks"])
    assert "streamed" in rows["device memory"]
    assert "python" in rows["processes"]
    assert len(long.migrations()) == count


def test_memory_that_is_taken_after_the_preflight(fast: GpuLab, points: Held, long: Job) -> None:
    host, gpu, to = long.seen(0).host, fast.where(long), free_gpu(fast, long)
    with (
        held_at(points, "swap.saved", long, "--to-gpu", to) as go_on,
        fast.occupied(host, LEFT, fast.gpus[host][int(to)]),
    ):
        code, said = go_on()
    assert code == 1, said
    assert f"did not move {host} GPU" in said
    assert "memory" in said
    long.go_on(3)
    assert fast.where(long) == gpu
    swap(fast, long, 0, to)


# ---- daemons that die ----


@pytest.mark.parametrize(
    ("point", "who", "state"),
    [
        pytest.param("orchestrator.prepared", "ctl", "failed", marks=pytest.mark.long),
        pytest.param("swap.saved", "ctl", "done", marks=pytest.mark.long),
        ("swap.saved", "agent", "failed"),
        pytest.param("swap.brought", "agent", "done", marks=pytest.mark.long),
    ],
)
def test_a_daemon_that_dies(
    fast: GpuLab, points: Held, long: Job, point: str, who: str, state: str
) -> None:
    host, gpu, to = long.seen(0).host, fast.where(long), free_gpu(fast, long)
    with interrupted(points, point, long, "--to-gpu", to):
        victim = host if who == "agent" else who
        labs.stop_daemon(fast.session.lab, victim)
        if who == "ctl":
            points.release(point)
        labs.start_daemon(fast.session.lab, victim)
    row = long.migrations()[-1]
    assert (row.state, row.kind) == (state, "swap"), row
    long.go_on(3)
    assert fast.where(long) == (fast.gpus[host][int(to)] if state == "done" else gpu)


def killed_helper(lab: GpuLab, points: Held, job: Job) -> tuple[int, str]:
    """A swap whose GPU helper is killed while the device state is on no GPU: how it ends."""
    host, to = job.seen(0).host, free_gpu(lab, job)
    with held_at(points, "swap.saved", job, "--to-gpu", to) as go_on:
        lab.kill_helpers(host)
        return go_on()


def test_memory_that_goes_with_its_helper_is_said_to_be_lost(fast: GpuLab, points: Held) -> None:
    job = fast.start("doomed")
    code, said = killed_helper(fast, points, job)
    assert code == 1, said
    assert "doomed/0 was lost" in said
    assert "the GPU helper had its memory" in said
    assert job.wait_end() == KILLED
    assert job.migrations()[-1].state == "lost"


@pytest.mark.long
def test_the_driver_s_own_copy_outlives_the_helper(
    plain: GpuLab, points: Held, references: References
) -> None:
    job = plain.start("spared")
    code, said = killed_helper(plain, points, job)
    assert code == 0, said
    job.go_on(3)
    plain.assert_whole(job, references)


def test_in_the_end_the_long_job_is_whole(
    fast: GpuLab, long_job: Job, references: References
) -> None:
    fast.assert_whole(long_job, references)
