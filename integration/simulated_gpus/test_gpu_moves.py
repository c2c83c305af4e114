# SPDX-License-Identifier: Apache-2.0
"""Ranks whose state lies in device memory move between hosts with GPUs of their own.

On the doubles (gpu_lab.py); CRIU, the agents, their helpers and the network are real. Each job's
losses, and at its end each byte of its device memory, are those of a run without liveshift; a
thread in it copies device memory about all the while.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from gpu_lab import MIB, GpuLab, gpu_lab, gpu_references
from held_moves import HASTY, held_at, interrupted
from lab_session import NewLab
from moving_job import AFTER, Job
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.messages import MigrationRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

GPUS = {"h0": (420, 420), "h1": (420, 420), "h2": (420, 420)}
"""MiB: room for what the jobs use and what a restore spares, but not for twice as much."""

OPTIONS = ("--slots", "2", *HASTY)
BLOCKS = 40 * MIB
"""What of device_train.py's memory the arena holds: six matrices and two blocks of 7.75 MiB."""

BALLAST_MIB = 96

PLAIN = ("gpu save", "gpu restore")
FAST = (*PLAIN, "gpu memory")


_labs: list[GpuLab] = []
LONG = "long"


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No job but the long one outlives its test: it would hold a GPU."""
    yield
    for lab in _labs:
        for job in lab.session.jobs:
            if job.name != LONG and job.code() is None:
                lab.session.cli("stop", job.name)


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "gpu-faultpoints") as made:
        yield made
    _labs.clear()


@pytest.fixture(scope="module")
def fast(new_lab: NewLab, place: Path, points: Held) -> GpuLab:
    """Three hosts that take the fast path."""
    _labs.append(gpu_lab(new_lab, place, GPUS, *OPTIONS))
    return _labs[-1]


@pytest.fixture(scope="module")
def plain(new_lab: NewLab, place: Path, points: Held) -> GpuLab:
    """Two that are told not to."""
    two = {host: GPUS[host] for host in ("h0", "h1")}
    _labs.append(gpu_lab(new_lab, place, two, "--gpu", "fast_path=off", *OPTIONS))
    return _labs[-1]


@pytest.fixture(scope="module")
def references(place: Path) -> References:
    return gpu_references(place)


@pytest.fixture(scope="module")
def long_job(fast: GpuLab) -> Job:
    return fast.start(LONG)


@pytest.fixture
def long(fast: GpuLab, points: Held, long_job: Job) -> Iterator[Job]:
    """A job that lives through the module; whatever the test did, it goes on afterwards, on one
    host and a GPU of that host, and nothing of it is left on the others."""
    yield long_job
    points.clear()
    long_job.go_on(5)
    host = long_job.seen(0).host
    assert fast.where(long_job) in fast.gpus[host]
    for other in fast.gpus.keys() - {host}:
        fast.wait_empty(other)
    for each in fast.gpus:
        fast.wait_forgotten(each)


def moved(lab: GpuLab, job: Job, index: int = 0, to: str = "") -> MigrationRow:
    """Move a capsule; its GPU is then one of the destination's, and the source's are empty."""
    source = job.seen(index).host
    row = job.migrate(index, to)
    rank = index  # of one capsule per rank; of a tree, its first
    job.go_on(5, rank)
    assert lab.where(job, rank) in lab.gpus[row.destination]
    lab.wait_empty(source)
    return row


def device_bytes(row: MigrationRow) -> int:
    """What the row says of device memory that went over the wire by itself."""
    return sum(phase.bytes or 0 for phase in row.phases if phase.name == "gpu memory")


def used_lanes(row: MigrationRow) -> int:
    """Over how many lanes that memory went; 0 if it went over lane 0."""
    detail = next(phase.detail for phase in row.phases if phase.name == "gpu memory")
    found = re.search(r"all went over (\d+) lanes? at once", detail)
    return int(found[1]) if found else 0


def dumped_bytes(row: MigrationRow) -> int:
    """What was on the host at the freeze: CRIU's images, and memory that went beside them."""
    found = [phase.bytes for phase in row.phases if phase.name in ("dump", "memory")]
    assert len(found) == 2
    return sum(size or 0 for size in found)


def assert_phases(row: MigrationRow, names: tuple[str, ...]) -> None:
    there = [phase.name for phase in row.phases]
    assert set(names) <= set(there), there


# ---- moves that succeed ----


@pytest.mark.long
def test_several_moves_in_a_row(fast: GpuLab, references: References) -> None:
    """What came by descriptor leaves by descriptor again."""
    job = fast.start("alone", "--forked-workers", "1")
    for to in ("h1", "h2", "h0"):
        row = moved(fast, job, to=to)
        assert_phases(row, FAST)
        assert device_bytes(row) == BLOCKS
    job.go_on(AFTER)
    job.assert_trained_across()
    fast.assert_whole(job, references)


@pytest.mark.long
def test_the_plain_path_carries_the_same_in_the_image(
    fast: GpuLab, plain: GpuLab, references: References
) -> None:
    job, other = (lab.start("heavy", "--ballast", str(BALLAST_MIB)) for lab in (plain, fast))
    slow, quick = moved(plain, job), moved(fast, other)
    assert_phases(slow, PLAIN)
    told = " ".join(plain.session.cli("events", "heavy").out.split())
    assert "all by the driver's own checkpoint (gpu.fast_path is off)" in told
    assert device_bytes(slow) == 0
    assert device_bytes(quick) == BLOCKS + BALLAST_MIB * MIB
    # A step under way has some tens of MiB on the host, too.
    assert dumped_bytes(slow) - dumped_bytes(quick) > BALLAST_MIB * MIB
    moved(plain, job, to="h0")
    for each in (job, other):
        each.stop()
    plain.assert_whole(job, references)
    fast.assert_whole(other, references)


def test_ranks_that_talk_by_nccl(fast: GpuLab, references: References) -> None:
    """The communicators are made anew on the other GPU."""
    job = fast.start("pair", nnodes=2)
    for index in (0, 1):
        row = moved(fast, job, index)
        assert_phases(row, FAST)
        detail = {phase.name: phase.detail for phase in row.phases}
        assert re.match(r"paused after collective \d+ of nccl", detail["quiesce"]), detail
        assert re.match(r"1 communicators? rebuilt", detail["reopen"]), detail
        assert device_bytes(row) >= BLOCKS
        assert used_lanes(row) > 1
    fast.assert_whole(job, references, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("lab", ["fast", "plain"])
def test_two_cuda_processes_in_one_capsule(
    request: pytest.FixtureRequest, references: References, lab: str
) -> None:
    """Two ranks below one launcher, each on a GPU of its own, with NCCL between them."""
    gpu: GpuLab = request.getfixturevalue(lab)
    job = gpu.start("tree", ranks=2)
    row = moved(gpu, job)
    assert {gpu.where(job, rank) for rank in (0, 1)} == set(gpu.gpus[row.destination])
    gpu.assert_whole(job, references, ranks=2)


# ---- moves that fail: the job goes on at its source, its device memory as it was ----


def way(lab: GpuLab, job: Job) -> tuple[str, str]:
    """The job's host, and another one for it to move to."""
    source = job.seen(0).host
    return source, next(host for host in lab.gpus if host != source)


def test_no_room_for_the_image(fast: GpuLab, points: Held, long: Job) -> None:
    """It is taken when device memory has left the GPU already."""
    source, to = way(fast, long)
    gpu = fast.where(long)
    with (
        held_at(points, "source.devices_saved", long, "--to", to) as go_on,
        fast.session.images_full(to),
    ):
        code, said = go_on()
    assert code == 1
    assert "No space left on device" in said
    assert long.migrations()[-1].state == "failed"
    long.go_on(5)
    assert (long.seen(0).host, fast.where(long)) == (source, gpu)
    moved(fast, long, to=to)


def test_a_gpu_that_is_full_is_refused_before_anything_stands(fast: GpuLab, long: Job) -> None:
    _, to = way(fast, long)
    with fast.occupied(to, left=16 * MIB):
        said = fast.session.refused("migrate", "long/0", "--to", to)
    assert re.search(r"[MG]B", said)
    assert to in said
    assert not any(row.frozen_s for row in long.migrations()[-1:] if row.state == "failed")


@pytest.mark.long
def test_memory_that_is_taken_after_the_preflight(fast: GpuLab, points: Held, long: Job) -> None:
    """No restore on a GPU works, after the commit: the job returns to its source."""
    source, gpu = long.seen(0).host, fast.where(long)
    to, other = (host for host in fast.gpus if host != source)
    with (
        held_at(points, "destination.restoring", long, "--to", to) as go_on,
        fast.occupied(to, left=MIB),
        fast.occupied(other, left=MIB),
    ):
        code, said = go_on()
    assert code == 1, said
    assert re.search(r"needs [\d.]+ [kM]B and [\d.]+ MB to spare on GPU-", said), said
    long.go_on(5)
    assert (long.seen(0).host, fast.where(long)) == (source, gpu)
    moved(fast, long, to=to)


# ---- daemons that die ----


DEATHS = [
    ("source.devices_saved", "source", "failed"),
    ("destination.granted", "destination", "done"),  # held by the helper, to be let go
]
MORE_DEATHS = [
    ("source.dumped", "destination", "failed"),  # what had come is not kept in its GPUs
    ("orchestrator.committed", "ctl", "done"),
    ("destination.restoring", "destination", "failed"),
    ("source.dumped", "source", "failed"),
    ("orchestrator.frozen", "ctl", "done"),
    ("destination.devices_back", "destination", "failed"),
    ("destination.running", "destination", "done"),
]


@pytest.mark.parametrize(
    ("point", "who", "state"),
    [*DEATHS, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_DEATHS)],
)
def test_a_daemon_that_dies(
    fast: GpuLab, points: Held, long: Job, point: str, who: str, state: str
) -> None:
    source, destination = way(fast, long)
    with interrupted(points, point, long, "--to", destination):
        victim = {"source": source, "destination": destination}.get(who, who)
        labs.stop_daemon(fast.session.lab, victim)
        labs.start_daemon(fast.session.lab, victim)
    row = long.migrations()[-1]
    assert row.state == state, row
    assert long.seen(0).host == (destination if row.state == "done" else source)


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "destination.granted",
        pytest.param("destination.restoring", marks=pytest.mark.long),
        pytest.param("source.dumped", marks=pytest.mark.long),
    ],
)
def test_the_destinations_helper_dies(fast: GpuLab, points: Held, long: Job, point: str) -> None:
    """What it had filled is gone with it; the source's helper has it still."""
    source, destination = way(fast, long)
    with interrupted(points, point, long, "--to", destination):
        fast.kill_helpers(destination)
    row = long.migrations()[-1]
    assert long.seen(0).host == (row.destination if row.state == "done" else source), row
    assert row.destination != destination or row.state == "failed", row
    fast.wait_probed(destination)  # by a helper that was started anew
    if long.seen(0).host != destination:
        moved(fast, long, to=destination)


def test_a_job_that_is_killed_while_it_is_off_the_gpus(fast: GpuLab, points: Held) -> None:
    """No helper keeps its memory."""
    job = fast.start("killed")
    with held_at(points, "source.devices_saved", job) as go_on:
        for pid in job.seen(0).tasks.values():
            os.kill(pid, signal.SIGKILL)
        go_on()
    for host in fast.gpus:
        fast.wait_forgotten(host)


def test_in_the_end_the_long_job_is_whole(
    fast: GpuLab, long_job: Job, references: References
) -> None:
    fast.assert_whole(long_job, references)
    for host in fast.gpus:
        assert "background work failed" not in fast.session.lab.log(host).read_text()


def test_memory_that_goes_with_the_sources_helper_is_said_to_be_lost(
    fast: GpuLab, points: Held
) -> None:
    """Nobody else has it: the rank is ended rather than let go on without its memory."""
    job = fast.start("doomed")
    source, destination = way(fast, job)
    with interrupted(points, "source.devices_saved", job, "--to", destination):
        fast.kill_helpers(source)
    assert job.wait_end() == 137
    assert "has it no more; so it was ended" in (job.migrations()[-1].error or "")
    fast.wait_probed(source)


@pytest.mark.long
def test_on_the_plain_path_the_image_has_all_of_it(
    plain: GpuLab, points: Held, references: References
) -> None:
    job = plain.start("calm")
    source, destination = way(plain, job)
    with interrupted(points, "source.dumped", job, "--to", destination):
        plain.kill_helpers(source)
    assert (job.migrations()[-1].state, job.seen(0).host) == ("done", destination)
    job.go_on(5)
    plain.assert_whole(job, references)


@pytest.mark.long
def test_memory_that_came_by_the_fast_path_goes_by_the_plain_one(
    fast: GpuLab, references: References
) -> None:
    """It was made by another process, the helper, which the driver's checkpoint does not bear: it
    is made the process's own first."""
    job = fast.start("turned")
    moved(fast, job)
    with told(fast, 'fast_path = "auto"', 'fast_path = "off"'):
        row = moved(fast, job)
        assert device_bytes(row) == 0
        assert_phases(row, PLAIN)
    fast.assert_whole(job, references)


@contextmanager
def told(lab: GpuLab, old: str, new: str) -> Iterator[None]:
    """The lab's daemons, started anew, find another line in the cluster file."""
    config = lab.session.lab.config

    def write(old: str, new: str) -> None:
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
        labs.stop_daemon(lab.session.lab, "ctl")
        labs.start_daemon(lab.session.lab, "ctl")
        lab.restart_agents()

    write(old, new)
    try:
        yield
    finally:
        write(new, old)


# ---- refused in words, nothing changed ----


@pytest.mark.parametrize(
    ("option", "said"),
    [
        pytest.param("--managed", "managed memory", marks=pytest.mark.long),
        ("--ipc", "CUDA IPC|IPC handle"),
    ],
)
def test_refused(fast: GpuLab, option: str, said: str) -> None:
    job = fast.start(f"no{option.strip('-')}", option)
    before, gpu = job.seen(0), fast.where(job)
    answer = fast.session.refused("migrate", f"{job.name}/0")
    assert re.search(said, answer), answer
    assert "hint:" in answer
    job.go_on(5)
    assert (job.seen(0), fast.where(job)) == (before, gpu)
    assert not any(row.frozen_s for row in job.migrations())
    job.stop()


# ---- nothing is left ----


def test_a_lab_that_ends_takes_its_helpers_along(new_lab: NewLab, place: Path) -> None:
    """They belong to no session and to nobody's process group."""
    lab = gpu_lab(new_lab, place, {"h0": (64,)})
    helpers = lab.helpers("h0")
    assert len(helpers) == 1
    lab.session.down()
    assert not any(helper.alive for helper in helpers)
