# SPDX-License-Identifier: Apache-2.0
"""A directory for snapshots that fills up in the middle: nothing torn is left there or taken for
whole, and the job is none the worse: it trains on, or stays suspended in memory."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fault_matrix.full import filled
from lab_session import LONG, LabSession, NewLab
from moving_job import AFTER, Job
from reference_runs import References

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

BEGUN = 2 << 20
"""Bytes of an image that are written before the disk is full."""
NO_ROOM = "No space left on device"


@pytest.fixture(scope="module")
def disk(place: Path) -> Iterator[Path]:
    """A file system of its own, which all hosts see: it is there before them."""
    path = place / "small-disk"
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g,mode=0700", "liveshift-test", str(path)]
    subprocess.run(mount, check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="module")
def lab(disk: Path, new_lab: NewLab) -> LabSession:
    """Two hosts run the job, two may hold its image; snapshots are off."""
    return new_lab("--hosts", "4")


@pytest.fixture
def job(lab: LabSession) -> Job:
    """A DDP job of two, in training."""
    started = lab.start(f"kept{len(lab.jobs)}", LONG, nnodes=2)
    started.wait_step(10)
    return started


@contextmanager
def full_in_the_middle(disk: Path) -> Iterator[None]:
    """The disk takes nothing more once there is something of an image; there is room afterwards."""
    begun, over = threading.Event(), threading.Event()

    def fill() -> None:
        while written(disk) < BEGUN:
            if over.wait(0.001):
                return
        with filled(disk):
            begun.set()
            over.wait()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert begun.is_set(), "the disk was never full"


def written(disk: Path) -> int:
    """Bytes of images that are on the disk."""
    size = 0
    for path in disk.rglob("*.zst"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def left(disk: Path) -> list[str]:
    return [str(path.relative_to(disk)) for path in disk.rglob("*")]


def resize(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def state(job: Job) -> str:
    return next(row.state for row in job.session.status().jobs if row.name == job.name)


def assert_refused(job: Job, disk: Path, *words: str) -> None:
    """The command fails and names the disk; nothing is left there, and nothing is resumed."""
    said = job.session.cli(*words, code=1)
    text = " ".join(said.err.split())
    print(text)
    assert NO_ROOM in text
    assert str(disk) in text
    assert "Traceback" not in text
    assert [name for name in left(disk) if name != ".filler"] == []
    refused = job.session.cli("resume", job.name, "--from", str(disk), code=None)
    print(refused)
    assert refused.code != 0, "there is nothing to resume from"


def save_and_go_on_from_there(job: Job, disk: Path, references: References) -> None:
    """With room again it is saved, ends, and goes on from there."""
    lab = job.session
    assert lab.json("snapshot", job.name, "--to", str(disk))["state"] == "saved"
    lab.cli("stop", job.name)
    lab.json("resume", job.name, "--from", str(disk))
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)
    shutil.rmtree(disk / job.name)


def test_a_job_trains_on_when_the_disk_fills_up(
    lab: LabSession, job: Job, disk: Path, references: References
) -> None:
    with full_in_the_middle(disk):
        assert_refused(job, disk, "snapshot", job.name, "--to", str(disk))
    assert state(job) == "running"
    job.go_on(AFTER)
    assert lab.json("snapshot", job.name, "--to", str(disk))["state"] == "saved", "there is room"
    job.assert_begins_like_never_moved(references)
    shutil.rmtree(disk / job.name)


@pytest.mark.long
def test_a_job_trains_on_when_only_the_manifest_has_no_room(
    lab: LabSession, job: Job, disk: Path, references: References
) -> None:
    """The disk has one file less than a whole snapshot needs, and the manifest comes last."""
    lab.json("snapshot", job.name, "--to", str(disk))
    files = len(left(disk))
    shutil.rmtree(disk / job.name)
    resize(disk, f"nr_inodes={files}")  # the top directory is one, too
    try:
        assert_refused(job, disk, "snapshot", job.name, "--to", str(disk))
    finally:
        resize(disk, "nr_inodes=0")
    job.go_on(AFTER)
    save_and_go_on_from_there(job, disk, references)


@pytest.mark.long
def test_a_job_stays_suspended_in_memory_when_the_disk_fills_up(
    lab: LabSession, job: Job, disk: Path, references: References
) -> None:
    with full_in_the_middle(disk):
        assert_refused(job, disk, "suspend", job.name, "--to", str(disk))
    assert state(job) == "suspended"
    assert len(job.protection().holders) == 2, "it is suspended in memory"
    with full_in_the_middle(disk):  # once more, of a job that is suspended
        assert_refused(job, disk, "suspend", job.name, "--to", str(disk))
    lab.json("resume", job.name)
    job.go_on(AFTER)
    lab.json("suspend", job.name, "--to", str(disk))
    assert (job.protection().holders, job.protection().directory) == ([], str(disk))
    lab.json("resume", job.name)
    job.go_on(AFTER)
    for rank in range(2):
        steps = [step["step"] for step in job.steps(rank)]
        assert steps == list(range(1, len(steps) + 1)), "each step once"
    job.assert_begins_like_never_moved(references)
    shutil.rmtree(disk / job.name)
