# SPDX-License-Identifier: Apache-2.0
"""Each way that memory may take: the job is what it was, and the record says which one it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from cold_job import COLD, assert_same_as_never_moved, start
from lab_session import AUTO, LabSession, NewLab
from moving_job import Job, Seen
from phases import phase
from reference_runs import References

from liveshift.runtime.cost import model as cost
from liveshift.runtime.messages import MigrationRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--slots", "2", *AUTO)


@contextmanager
def unharmed(lab: LabSession, references: References, name: str) -> Iterator[tuple[Job, Seen]]:
    """A job, and where its second rank is; in the end it must be what a job is that never moved."""
    job = start(lab, name)
    yield job, job.seen(1)
    assert_same_as_never_moved(job, references)


def test_every_way_leaves_the_job_as_it_was(lab: LabSession, references: References) -> None:
    job = start(lab, "ways")
    stopped, once, more = (
        job.migrate(1, options=("--way", w)) for w in ("stop", "round", "rounds")
    )
    for row, way in ((stopped, "stop"), (once, "round"), (more, "rounds")):
        assert row.predicted is not None
        assert (row.predicted.how, row.predicted.because) == (way, "asked for")
        assert (phase(row, "restore").bytes or 0) > COLD, "all of it was put in place"
    assert "no round" in phase(stopped, "pre-copy").detail
    assert phase(stopped, "place ahead").detail.startswith("room for "), "before the job stood"
    assert (phase(stopped, "memory").bytes or 0) > COLD, "all of it went at the freeze"
    assert "in all" in phase(stopped, "memory").detail
    assert "rewritten" in phase(once, "memory").detail
    assert phase(stopped, "last round").detail == "none was under way"
    assert phase(once, "last round").detail == "none was under way", "its one round has ended"
    for row in (once, more):
        assert (phase(row, "pre-copy").bytes or 0) > COLD
        assert (phase(row, "memory").bytes or 0) < COLD / 2
    assert phase(once, "pre-copy").detail.startswith("1 round,")
    assert more.precopy is not None
    assert more.precopy.round >= 2
    assert_same_as_never_moved(job, references)


@pytest.mark.long
def test_a_small_rank_on_busy_cores_is_stopped_and_the_plan_says_so_before(
    lab: LabSession, references: References
) -> None:
    job = start(lab, "auto")
    planned = lab.json("migrate", f"{job.name}/1", "--dry-run")["prediction"]
    assert planned["how"] in ("stop", "round", "rounds")
    assert {each["way"] for each in planned["weighed"]} == {"stop", "round", "rounds"}
    assert planned["lost_s"] == pytest.approx(planned["seconds"] + planned["slower_s"])
    assert planned["empty_s"] > planned["seconds"] > 0
    said = lab.cli("migrate", f"{job.name}/1", "--dry-run").out
    assert "of training (paused" in said
    assert "way: " in said
    row = job.migrate(1)
    assert row.predicted is not None
    assert row.predicted.given is not None
    best = min(each.lost_s for each in row.predicted.weighed)
    taken = min(e.lost_s for e in row.predicted.weighed if e.way == row.predicted.how)
    assert taken <= cost.SIMPLER * best + 0.02
    assert_same_as_never_moved(job, references)


def test_what_cannot_be_gone_in_time_is_said_and_moves_unharmed(
    lab: LabSession, references: References
) -> None:
    with unharmed(lab, references, "late") as (job, before):
        said = lab.cli("migrate", f"{job.name}/1", "--within", "0.2s", "-o", "json", code=124)
        row = msgspec.convert(json.loads(said.out), MigrationRow)
        job.assert_moved(before, row)
        assert row.state == "done"
        assert row.predicted is not None
        assert (row.predicted.needs_s or 0) > 0.2
        assert "may not be gone in time" in lab.cli("events", "late").out
        in_time = job.migrate(1, options=("--within", "60s"))
        assert in_time.predicted is not None
        assert in_time.predicted.needs_s is None


@pytest.mark.parametrize("capsules", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_host_is_empty_in_time_and_says_so_before(
    lab: LabSession, references: References, capsules: int
) -> None:
    jobs = [start(lab, f"soon{capsules}{n}") for n in range(capsules)]
    host = max(lab.status().hosts, key=lambda row: len(row.capsules))
    assert len(host.capsules) == capsules
    leaving = [(j, rank) for j in jobs for rank in (0, 1) if f"{j.name}/{rank}" in host.capsules]
    before = [job.seen(rank) for job, rank in leaving]
    said = lab.cli("drain", host.name, "--within", "60s", "-o", "json", "--reason", "spot notice")
    found = json.loads(said.out)
    lab.cli("uncordon", host.name)
    assert found["empty"]
    planned = found["deadline"]
    assert {each["capsule"] for each in planned["capsules"]} == set(host.capsules)
    assert not any(each["late"] for each in planned["capsules"])
    assert 0 < planned["empty_s"] <= 60
    for (job, _), seen in zip(leaving, before, strict=True):
        job.assert_moved(seen, job.migration_after(0))
    for job, _ in leaving:
        assert_same_as_never_moved(job, references)


@pytest.mark.long
def test_a_notice_that_is_too_short_is_said_and_harms_nothing(
    lab: LabSession, references: References
) -> None:
    with unharmed(lab, references, "short") as (job, before):
        said = lab.cli("taint", "host", before.host, "--within", "1s", code=124)
        lab.cli("uncordon", before.host)
        assert "may not be gone in time: it needs up to" in said.out
        job.assert_moved(before, job.migration_after(0))
