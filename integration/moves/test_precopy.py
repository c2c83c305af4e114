# SPDX-License-Identifier: Apache-2.0
"""Memory that is hardly written goes ahead while the job trains, and is what it was wherever the
job goes; where that cannot be, or fails, the job loses nothing by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cold_job import COLD, assert_memory_is_what_it_wrote, assert_same_as_never_moved, start
from lab_session import AS_EVER, LabSession, NewLab, eventually
from moving_job import Job
from phases import phase
from reference_runs import References

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--slots", "2", *AS_EVER)


def test_cold_memory_goes_ahead_three_times_in_a_row(
    lab: LabSession, references: References
) -> None:
    job = start(lab, "cold")
    rows = [job.migrate(1) for _ in range(3)]
    for row in rows:
        ahead, memory = phase(row, "pre-copy"), phase(row, "memory")
        assert (ahead.bytes or 0) > COLD, ahead
        assert not ahead.frozen
        assert (memory.bytes or 0) < COLD / 2, "what was not rewritten was not sent again"
        assert row.image_bytes < COLD / 2, row
        assert (phase(row, "restore").bytes or 0) > COLD, "and yet all of it was put in place"
        assert row.precopy is not None
        assert row.precopy.round >= 2
    assert_same_as_never_moved(job, references)


@pytest.mark.long
def test_memory_that_processes_share_goes_with_a_full_dump_and_stays_shared(
    lab: LabSession, references: References
) -> None:
    job = start(lab, "shared", "--sharers", "2")
    row = job.migrate(1)
    assert re.search(r"share \d{3} MB copy on write", phase(row, "pre-copy").detail)
    assert row.image_bytes > COLD
    told = " ".join(lab.cli("events", "shared/1").out.split())
    assert "copies all memory while paused (full dump): its processes share" in told
    assert_same_as_never_moved(job, references)


@contextmanager
def in_precopy(lab: LabSession, job: Job, to: str) -> Iterator[Callable[[], str]]:
    """A move that is in its pre-copy, over a link that makes it last; the callable waits for its
    end, which must be a failure, and returns what it said."""
    lab.cli("lab", "link", to, "--rate", "100mbit")
    try:
        with lab.popen("migrate", f"{job.name}/1", "--to", to) as moving:

            def failed() -> str:
                out, err = moving.communicate(timeout=90)
                assert moving.returncode != 0, out
                return " ".join(err.decode().split())

            def brought() -> int:
                rows = lab.status().moving
                return rows[0].precopy.bytes if rows and rows[0].precopy else 0

            eventually(lambda: brought() > 4 << 20, "pages to flow", 30)
            yield failed
            moving.kill()
    finally:
        lab.cli("lab", "link", to, "--rate", "none", "--mend")


@pytest.fixture(scope="module")
def endless(lab: LabSession) -> Job:
    return start(lab, "endless")


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param("source's agent", marks=pytest.mark.long),
        "destination's agent",
        pytest.param("link cut", marks=pytest.mark.long),
    ],
)
def test_a_pre_copy_that_fails_leaves_the_job_alone(
    lab: LabSession, endless: Job, harm: str
) -> None:
    before = endless.seen(1)
    to = next(
        host for host in ("h0", "h1", "h2") if host not in (endless.seen(0).host, before.host)
    )
    with in_precopy(lab, endless, to) as failed:
        if harm == "link cut":
            lab.cli("lab", "link", to, "--cut")
        else:
            lab.stop_agent(before.host if harm == "source's agent" else to)
        endless.go_on(20, rank=1)
        assert failed()
    if harm != "link cut":
        lab.start_agent(before.host if harm == "source's agent" else to)
    eventually(lambda: lab.host(to).state == "up", f"{to} to be up", 30)
    eventually(lambda: lab.host(before.host).state == "up", f"{before.host} to be up", 30)
    assert endless.seen(1) == before, "the very same processes, where they were"
    row = endless.migrate(1, to)
    assert (phase(row, "pre-copy").bytes or 0) > COLD
    endless.go_on(5)


def test_its_memory_is_what_it_wrote(endless: Job) -> None:
    endless.stop()
    assert len(endless.steps(0)) > 60
    assert_memory_is_what_it_wrote(endless)
