# SPDX-License-Identifier: Apache-2.0
"""With ``every = "auto"`` the orchestrator chooses how often it takes snapshots, from what it has
measured of the job.

The interval is Young's: sqrt(2 * C * M) seconds for snapshots that cost the job C seconds each, on
hosts of which one fails every M seconds. The tests compute it from what ``status`` says.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, steps, wait_past, wait_rewound, wait_steps
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.messages import ProtectionRow
from liveshift.runtime.model.interval import ROOM, SMOOTHING

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

OFTEN_S, SELDOM_S = 60.0, 3600.0
"""A single host fails once in this time. OFTEN_S is the least that a cluster file may say."""
HOSTS = 2  # that run the job
COUNT = 4  # snapshots that are watched
BUSY_S = 5.0
"""A snapshot may come so much later than it is due, on a machine with two busy cores."""
ROUNDED_S = 0.1


def auto(mttf_s: float) -> tuple[str, ...]:
    """Options of ``lab up``. With this ``cost``, the share that snapshots may take is no limit: it
    would be one for snapshots that cost more than ``mttf_s`` / 4 seconds each."""
    snapshots = f"every=auto,mttf={mttf_s:g},cost=0.5"
    return "--hosts", "3", "--snapshots", snapshots, "--timeouts", "suspicion=1"


def young(cost_s: float, mttf_s: float) -> float:
    return math.sqrt(2 * cost_s * mttf_s / HOSTS)


@dataclass(frozen=True)
class Taken:
    """A snapshot as ``status`` shows it soon after it is complete. ``time``: of its boundary, in
    seconds since 1970."""

    row: ProtectionRow
    time: float


def taken(job: Job, count: int) -> list[Taken]:
    """Wait until the job has had so many snapshots, and return each of them."""
    found: list[Taken] = []
    while len(found) < count:
        (row,) = eventually(lambda: _newer(job, found), f"snapshot {len(found) + 1}", 60)
        found.append(Taken(row, time.time() - row.age))
    return found


def _newer(job: Job, found: list[Taken]) -> list[ProtectionRow]:
    row = job.protection()
    return [row] if row.newest not in ("", *(each.row.newest for each in found)) else []


@contextmanager
def run(lab: LabSession, name: str) -> Iterator[tuple[Job, subprocess.Popen[bytes]]]:
    """``liveshift run`` of a DDP job of two, in the foreground."""
    out = lab.place / f"{lab.name}-{name}"
    out.mkdir()
    words = [word.replace("{out}", str(out)) for word in LONG]
    start = ("run", "--verbose", "--nnodes", str(HOSTS), "--name", name, "--", *words)
    with lab.popen(*start, stdout=subprocess.DEVNULL) as process:
        job = Job(lab, name, LONG, HOSTS, out)
        lab.jobs.append(job)
        try:
            yield job, process
        finally:
            process.terminate()


def test_snapshots_come_at_the_interval_that_status_tells(
    new_lab: NewLab, references: References
) -> None:
    lab = new_lab(*auto(OFTEN_S))
    with run(lab, "chosen") as (job, foreground):
        eventually(job.steps, "its first step")
        snapshots = taken(job, COUNT)
        assert_interval_follows([each.row for each in snapshots])
        assert_came_in_time(snapshots)
        assert_is_told(lab, job)

        before = len(steps(job, 0))
        cut = time.time()
        labs.kill_host(lab.lab, "h1")
        wait_rewound(job, 1)
        wait_steps(job, cut, AFTER)
        assert job.seen(0).host == "h0", "it is restored in place"
        assert job.seen(1).host == "h2", "it is restored on the holder"
        (rewound,) = events(job, "rewound")
        number = re.search(r"runs again from s([0-9]+): ", rewound.text)
        assert number is not None
        assert int(number[1]) >= COUNT
        print(rewound.text)
        wait_past(job, before)
        job.assert_begins_like_never_moved(references)
        _, said = foreground.communicate(timeout=30)
    assert foreground.returncode == 0
    assert_run_told(" ".join(said.decode().split()), snapshots[0].row)


def assert_interval_follows(rows: list[ProtectionRow]) -> None:
    """Each interval is Young's, or longer: twice what a snapshot takes until it is complete. On a
    slow machine it is longer."""
    cost = rows[0].pause_s
    for row in rows:
        cost += SMOOTHING * (row.pause_s - cost)
        best = young(cost, OFTEN_S)
        print(
            f"{row.newest}: paused for {row.pause_s:.3f} s, every {row.every:.3f} s ({best:.3f} s),"
            f" complete after {row.takes_s:.3f} s"
        )
        assert (row.auto, row.mttf_s, row.mttf_from) == (True, OFTEN_S / HOSTS, "given")
        assert row.takes_s > row.pause_s
        assert row.every == pytest.approx(max(best, ROOM * row.takes_s), rel=0.001)


def assert_came_in_time(snapshots: list[Taken]) -> None:
    """The interval counts from the beginning of a snapshot, and ``status`` has its boundary, which
    comes a little later: in the first snapshot up to half an interval later, as it sends all."""
    gaps = [other.time - one.time for one, other in pairwise(snapshots)]
    intervals = [each.row.every for each in snapshots[:-1]]
    for each, gap, every in zip(snapshots[1:], gaps, intervals, strict=True):
        print(f"{each.row.newest} came after {gap:.2f} s, the interval was {every:.2f} s")
        assert gap < 1.5 * every + BUSY_S
    assert sum(gaps) > sum(intervals) - intervals[0] / 2 - ROUNDED_S


def assert_is_told(lab: LabSession, job: Job) -> None:
    row = job.protection()
    assert row.holders == ["h2"]
    wide = " ".join(lab.cli("status", "-o", "wide").out.split())
    told = re.search(r"a snapshot every ([0-9]+) s \(auto; a failure every 30 s: given\)", wide)
    assert told is not None, wide
    assert float(told[1]) == pytest.approx(row.every, abs=BUSY_S)


def assert_run_told(said: str, first: ProtectionRow) -> None:
    """``liveshift run`` says so once: an interval that only changes a little is no news."""
    told = re.findall(r"protected: a snapshot every ([0-9.]+) s, held by h2", said)
    assert [float(every) for every in told] == [pytest.approx(first.every, rel=0.1)], said


def test_what_copying_takes_from_the_job_is_measured(new_lab: NewLab) -> None:
    """It is measured where the next snapshot does not come within 30 s: the measurement goes on for
    some seconds after the snapshot."""
    lab = new_lab(*auto(SELDOM_S))
    job = lab.start("slowed", LONG, nnodes=HOSTS)
    (first,) = taken(job, 1)
    best = max(young(first.row.pause_s, SELDOM_S), ROOM * first.row.takes_s)
    assert first.row.every == pytest.approx(best, rel=0.001)
    said = rf"{first.row.newest} of {job.name}: slowed it down by ([0-9.]+) s besides the pause"
    log = lab.lab.log("ctl")
    (text,) = eventually(lambda: re.findall(said, log.read_text()), "the measurement", 40)
    slowed, row = float(text), job.protection()
    print(f"paused for {row.pause_s:.3f} s, slowed down by {slowed:.2f} s, every {row.every:.1f} s")
    assert row.newest == first.row.newest
    longer = max(young(row.pause_s + slowed, SELDOM_S), ROOM * row.takes_s)
    assert row.every == pytest.approx(longer, rel=0.05)  # the log has two decimals
    job.stop()
