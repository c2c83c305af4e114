# SPDX-License-Identifier: Apache-2.0
"""A job of which snapshots are taken all the time, and which never notices.

Its losses and parameters are those of a run without liveshift, its processes are the same from
the first step to the last, and another host has its images.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from reference_runs import References

from liveshift.runtime.messages import ProtectionRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

EVERY_S = 2.0
LASTS_S = 20.0
GENERATIONS = 4
"""So many must be complete within LASTS_S, also on a machine with two busy cores."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Three hosts: two run the job, the third one holds its images. With a second slot there, a
    rank can also move."""
    return new_lab("--hosts", "3", "--slots", "2", "--snapshots", f"every={EVERY_S:g}")


def number(row: ProtectionRow) -> int:
    return int(row.newest.removeprefix("s") or 0)


def dropped(lab: LabSession, host: str) -> bool:
    return held_bytes(lab, host) == 0


def held_bytes(lab: LabSession, host: str) -> int:
    """Bytes of memory that images take on a host, as this machine's own eyes see it."""
    init = lab.lab.machine(host).init
    assert init is not None
    size = 0
    for folder, _, names in os.walk(f"/proc/{init.pid}/root/run/liveshift/images/held"):
        for name in names:
            with suppress(FileNotFoundError):  # the holder drops an earlier image just now
                size += (Path(folder) / name).lstat().st_blocks * 512
    return size


def take(lab: LabSession, job: Job, count: int, seconds: float) -> list[ProtectionRow]:
    """Watch for ``seconds``, and until ``count`` snapshots more were complete; return each."""
    began, seen = time.monotonic(), [job.protection()]
    while len(seen) <= count or time.monotonic() < began + seconds:
        assert time.monotonic() < began + seconds + 60, f"{seen[-1]}: {lab.history(job.name)}"
        row = job.protection()
        if row.newest != seen[-1].newest:
            print(f"{row.newest}: paused for {row.pause_s:.3f} s, {row.bytes / 1e6:.1f} MB")
            seen.append(row)
        time.sleep(0.1)
    return seen[1:]


def test_a_job_does_not_notice_its_snapshots(lab: LabSession, references: References) -> None:
    job = lab.start("kept", LONG, nnodes=2)
    job.wait_step(10)
    before = [job.seen(index) for index in range(2)]
    steps = len(job.steps())
    seen = take(lab, job, GENERATIONS, LASTS_S)
    numbers = list(map(number, seen))
    assert numbers == sorted(set(numbers))
    (spare,) = {"h0", "h1", "h2"} - {each.host for each in before}
    for row in seen:
        assert (row.every, row.holders, row.why_not) == (EVERY_S, [spare], "")
        assert row.bytes > 0
        assert 0 < row.pause_s < 10
    assert held_bytes(lab, spare) > 10 << 20, "two processes with torch"
    for each in before:
        assert held_bytes(lab, each.host) > 5 << 20, "its own copy, for a rewind in place"
    assert len(job.steps()) > steps + AFTER, "it trained meanwhile"
    after = [job.seen(index) for index in range(2)]
    assert [each.tasks for each in after] == [each.tasks for each in before], "the same processes"
    kinds = [event.kind for event in lab.history(job.name)]
    assert kinds.count("protected") == 1
    assert "unprotected" not in kinds
    wide = " ".join(lab.cli("status", "-o", "wide").out.split())
    assert f"on {spare}" in wide
    assert (
        "kept/0 and kept/1 would go back in place where the host lives, from a copy there" in wide
    )
    job.assert_begins_like_never_moved(references)
    for host in (spare, *(each.host for each in before)):
        eventually(partial(dropped, lab, host), f"{host} to drop what is not needed", 30)


@pytest.mark.long
def test_a_move_in_between(lab: LabSession, references: References) -> None:
    job = lab.start("moved", LONG, nnodes=2)
    job.wait_step(10)
    (first, *_) = take(lab, job, 1, 0.0)
    job.migrate(1, to=job.seen(0).host)  # so that the holder stays one
    (*_, last) = take(lab, job, 2, 0.0)
    assert last.holders == first.holders
    assert number(last) > number(first)
    job.go_on(AFTER)
    job.assert_trained_across(2)
    job.assert_quiesced(communicates=True)
    job.assert_begins_like_never_moved(references)
