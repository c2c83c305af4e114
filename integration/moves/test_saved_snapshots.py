# SPDX-License-Identifier: Apache-2.0
"""A job that trains is saved in a directory, and goes on from there later: after its end, under an
orchestrator that has never had it, and in another cluster that trusts the first one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from reference_runs import References

from liveshift.errors import LiveshiftError
from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run the job, the others may hold its image; snapshots are off."""
    return new_lab("--hosts", "4")


@pytest.fixture
def kept(place: Path) -> Iterator[Path]:
    """A directory that all hosts see."""
    with TemporaryDirectory(prefix="kept-", dir=place) as name:
        yield Path(name)


def steps(job: Job) -> list[list[int]]:
    return [[step["step"] for step in job.steps(rank)] for rank in range(2)]


def gone_on(job: Job, references: References) -> None:
    """The job trains on from its snapshot, and each step is what it was or would have been."""
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


def test_a_job_is_saved_while_it_trains_and_goes_on_from_there_after_its_end(
    lab: LabSession, kept: Path, references: References
) -> None:
    job = lab.start("kept", LONG, nnodes=2)
    job.wait_step(10)
    before = [job.seen(index).host for index in range(2)]
    said = lab.json("snapshot", job.name, "--to", str(kept))
    assert said["state"] == "saved"
    assert [job.seen(index).host for index in range(2)] == before, "it trains on where it was"
    name = said["text"].split()[2]
    assert {path.name for path in (kept / job.name).iterdir()} == {
        f"{name}.json",
        f"{name}.0",
        f"{name}.1",
    }
    size = sum(path.stat().st_blocks * 512 for path in kept.rglob("*"))
    assert size > 20 << 20, "two processes with torch, compressed"
    saved_at = max(map(len, steps(job)))
    job.go_on(AFTER)
    assert "is running" in lab.refused("resume", job.name, "--from", str(kept))
    lab.cli("stop", job.name)
    trained = [len(numbers) for numbers in steps(job)]
    assert min(trained) > saved_at

    would = lab.json("resume", job.name, "--from", str(kept), "--dry-run")
    assert would["snapshot"] == name
    lab.json("resume", job.name, "--from", str(kept))
    gone_on(job, references)
    assert "adopted" in [event.kind for event in lab.history(job.name)]
    job.stop()


@pytest.mark.long
def test_an_orchestrator_that_has_never_had_a_job_resumes_it(
    lab: LabSession, kept: Path, references: References
) -> None:
    job = lab.start("moved-in", LONG, nnodes=2)
    job.wait_step(10)
    lab.json("snapshot", job.name, "--to", str(kept))
    lab.cli("stop", job.name)
    labs.stop_daemon(lab.lab, "ctl")
    for file in lab.lab.directory.rglob("journal*"):
        file.unlink()
    labs.start_daemon(lab.lab, "ctl")
    eventually(lambda: all_up(lab), "the hosts to report to the orchestrator", 30)
    assert "no job" in lab.refused("status", job.name, code=4)
    lab.json("resume", job.name, "--from", str(kept))
    gone_on(job, references)
    job.stop()


def test_what_was_changed_is_refused(lab: LabSession, kept: Path) -> None:
    job = lab.start("forged", LONG, nnodes=2)
    job.wait_step(5)
    lab.json("snapshot", job.name, "--to", str(kept))
    lab.cli("stop", job.name)
    (manifest,) = (kept / job.name).glob("s*.json")
    right = manifest.read_bytes()
    manifest.write_bytes(right.replace(b'"boundary":"', b'"boundary":"x', 1))
    assert "was changed since it was signed" in lab.refused("resume", job.name, "--from", str(kept))
    manifest.write_bytes(right)
    image = max(kept.rglob("*.zst"), key=lambda path: path.stat().st_size)
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        file.write(b"\0" * 64)
    refused = lab.cli("resume", job.name, "--from", str(kept), code=1)
    assert "is damaged" in " ".join(refused.err.split())
    assert lab.json("status", job.name)["jobs"][0]["state"] == "suspended"
    assert lab.json("stop", job.name)["state"] == "ended"


def all_up(lab: LabSession) -> bool:
    try:
        return all(host.state == "up" for host in lab.status().hosts)
    except LiveshiftError:
        return False


@pytest.mark.long
def test_another_cluster_resumes_what_it_trusts(
    lab: LabSession, new_lab: NewLab, kept: Path, references: References
) -> None:
    job = lab.start("abroad", LONG, nnodes=2)
    job.wait_step(10)
    lab.json("snapshot", job.name, "--to", str(kept))
    lab.cli("stop", job.name)
    other = new_lab("--hosts", "2")
    refused = other.refused("resume", job.name, "--from", str(kept))
    assert "is signed by another cluster, whose key is " in refused
    key = refused.partition("whose key is ")[2].split()[0]
    other.cli("keys", "trust", "first", key, "--config", str(other.lab.config))
    other.json("resume", job.name, "--from", str(kept))
    there = Job(other, job.name, job.argv, 2, job.out)
    gone_on(there, references)
    there.stop()
    shutil.rmtree(kept / job.name)
