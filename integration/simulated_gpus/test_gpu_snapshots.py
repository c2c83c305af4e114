# SPDX-License-Identifier: Apache-2.0
"""Ranks whose state lies in device memory go back to a snapshot, bit for bit: on the GPUs where
they are, or on those of another host.

On the doubles (gpu_lab.py); CRIU, the agents, their helpers and the network are real. At the end
each byte of device memory is that of a run without liveshift.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fault_matrix.held import Held, holding
from gpu_lab import MIB, GpuLab, gpu_lab, gpu_references
from lab_session import NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, wait_protected, wait_rewound
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

GPUS = {"h0": (420,), "h1": (420,), "h2": (420,)}
"""MiB: two hosts run the job, the third one holds its images and has a GPU to spare."""

RESTORE_S = 6
TIMEOUTS = f"collective=120,heartbeat=0.3,suspicion=1.5,restore={RESTORE_S}"
OPTIONS = ("--snapshots", "every=3", "--timeouts", TIMEOUTS)
BLOCKS = 40 * MIB
"""What device_train.py has in device memory, at least: six matrices and two blocks of 7.75 MiB."""


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "gpu-snapshot-faultpoints") as made:
        yield made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, place: Path, points: Held) -> GpuLab:
    return gpu_lab(new_lab, place, GPUS, *OPTIONS)


@pytest.fixture(scope="module")
def references(place: Path) -> References:
    return gpu_references(place)


@pytest.fixture
def start(lab: GpuLab, points: Held) -> Iterator[Callable[[str, int], Job]]:
    """Starts a job of so many ranks, and waits for its first snapshot. No job outlives its test."""
    started: list[Job] = []

    def begin(name: str, ranks: int) -> Job:
        job = lab.start(name, nnodes=ranks)
        started.append(job)
        eventually(lambda: events(job, "protected"), "the first snapshot", 60)
        return job

    yield begin
    points.clear()
    for job in started:
        if job.code() is None:
            lab.session.cli("stop", job.name)
    down = [host for host in lab.gpus if lab.session.lab.machine(host).init is None]
    for host in down:
        lab.session.boot(host)
        lab.give(host, *GPUS[host])
    if down:  # with a helper that has seen other GPUs
        lab.restart_agents()


Start = Callable[[str, int], Job]


def test_a_host_with_a_gpu_is_lost(lab: GpuLab, start: Start, references: References) -> None:
    """Two ranks talk by NCCL. One goes on where it is, the other one on the GPU of h2."""
    job = start("pair", 2)
    hosts, gpus = [job.seen(rank).host for rank in range(2)], [lab.where(job, r) for r in range(2)]
    (spare,) = lab.gpus.keys() - hosts
    lab.wait_empty(spare)
    labs.kill_host(lab.session.lab, hosts[1])
    wait_rewound(job, 1)
    for rank in range(2):
        job.go_on(AFTER, rank)
    assert [job.seen(rank).host for rank in range(2)] == [hosts[0], spare]
    assert [lab.where(job, rank) for rank in range(2)] == [gpus[0], *lab.gpus[spare]]
    assert sum(lab.used(spare).values()) >= BLOCKS, "no host can hold a snapshot now"
    assert [e for e in events(job, "rewinding") if "1 communicators rebuilt" in e.text]
    lab.assert_whole(job, references, ranks=2)


@pytest.mark.long
def test_a_rank_is_killed_and_its_job_suspended(
    lab: GpuLab, start: Start, references: References
) -> None:
    """It comes back on the GPU that it had; then on the one of another host."""
    job = start("solo", 1)
    host, gpu = job.seen(0).host, lab.where(job)
    (pid,) = job.seen(0).tasks.values()
    os.kill(pid, signal.SIGKILL)
    wait_rewound(job, 1)
    job.go_on(AFTER)
    assert (job.seen(0).host, lab.where(job)) == (host, gpu)
    lab.session.cli("suspend", job.name)
    for each in lab.gpus:
        lab.wait_empty(each)
    lab.session.cli("cordon", host)
    try:
        lab.session.cli("resume", job.name)
        job.go_on(AFTER)
    finally:
        lab.session.cli("uncordon", host)
    assert job.seen(0).host != host
    assert lab.where(job) in lab.gpus[job.seen(0).host]
    lab.assert_whole(job, references)


@contextmanager
def kernel_log_of(lab: GpuLab, host: str, log: Path) -> Iterator[None]:
    """Let a host's agent read this file as the kernel's log, to which a driver would write."""
    log.touch()
    subprocess.run([*lab.entry(host), "mount", "--bind", str(log), "/dev/kmsg"], check=True)
    try:
        lab.restart_agents()
        yield
    finally:
        subprocess.run([*lab.entry(host), "umount", "--lazy", "/dev/kmsg"], check=True)


OUTLIVES_S = 8
"""Longer than ``timeouts.fault`` of this lab."""
LAUNCHER = ("sh", "-c", f'"$@" || {{ sleep {OUTLIVES_S}; exit 1; }}', "launcher")
"""As torchrun, which may wait for other ranks when one of them has failed."""


@pytest.mark.long
def test_a_rank_that_fails_after_an_error_of_its_gpu_is_taken_back(
    lab: GpuLab, place: Path, references: References
) -> None:
    """It ends with code 1, as programs do when CUDA fails. Only the driver knows why, and says so
    in the kernel's log. The rank goes on on the GPU of another host."""
    job = lab.session.start("failing", (*LAUNCHER, *lab.train("--fail", "{out}/fail")), nnodes=2)
    try:
        for rank in range(2):
            job.wait_step(5, rank)
        host, gpu = job.seen(1).host, lab.where(job, 1)
        (spare,) = lab.gpus.keys() - {job.seen(rank).host for rank in range(2)}
        with kernel_log_of(lab, host, place / "kernel-log"):
            wait_protected(job)
            with (place / "kernel-log").open("a") as log:
                log.write("3,9,7000,-;NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off.\n")
            (job.out / "fail1").touch()
            wait_rewound(job, 1)
            job.go_on(AFTER, 1)
        why, *_ = (event.text for event in events(job, "rewinding"))
        assert f"{job.name}/1 ended with code 1, and {gpu} of {host} reported Xid 79" in why
        assert not (job.out / "fail1").exists()
        assert job.seen(1).host == spare
        lab.assert_whole(job, references, ranks=2)
    finally:
        if job.code() is None:
            lab.session.cli("stop", job.name)


@pytest.mark.long
def test_a_job_is_saved_in_a_directory(
    lab: GpuLab, place: Path, start: Start, references: References
) -> None:
    """It goes on from there after its end, on the GPU of another host."""
    job = start("saved", 1)
    host = job.seen(0).host
    with TemporaryDirectory(prefix="kept-", dir=place) as kept:
        assert lab.session.json("snapshot", job.name, "--to", kept)["state"] == "saved"
        job.go_on(AFTER)
        lab.session.cli("stop", job.name)
        lab.session.cli("cordon", host)
        try:
            lab.session.cli("resume", job.name, "--from", kept)
            job.go_on(AFTER)
        finally:
            lab.session.cli("uncordon", host)
        assert job.seen(0).host != host
        assert lab.where(job) in lab.gpus[job.seen(0).host]
        lab.assert_whole(job, references)


@pytest.mark.long
@pytest.mark.parametrize("point", ["snapshot.locked", "snapshot.dumped"])
def test_the_agent_dies_while_device_state_is_off_the_gpu(
    lab: GpuLab, points: Held, start: Start, references: References, point: str
) -> None:
    job = start(f"orphan-{point.partition('.')[2]}", 1)
    host, gpu = job.seen(0).host, lab.where(job)
    points.arm(point)
    points.wait(point)
    assert not any(lab.used(host).values())
    labs.stop_daemon(lab.session.lab, host)
    points.clear()
    labs.start_daemon(lab.session.lab, host)
    job.go_on(AFTER)
    wait_protected(job)
    assert (job.seen(0).host, lab.where(job)) == (host, gpu)
    assert not events(job, "rewinding")
    lab.assert_whole(job, references)


@pytest.mark.long
def test_device_state_that_finds_no_room_any_more(
    lab: GpuLab, points: Held, start: Start, references: References
) -> None:
    """Somebody has taken the GPU in the pause. The job waits, then goes back to its snapshot on the
    GPU of another host."""
    job = start("crowded", 1)
    host = job.seen(0).host
    points.arm("snapshot.dumped")
    points.wait("snapshot.dumped")
    with lab.occupied(host, left=MIB):
        points.release("snapshot.dumped")
        wait_rewound(job, 1)
        job.go_on(AFTER)
        assert job.seen(0).host != host
    said = " ".join(event.text for event in lab.session.history(job.name))
    assert f"{job.name}/0 did not go on at once on {host}" in said
    assert "to spare on GPU-" in said
    lab.assert_whole(job, references)
