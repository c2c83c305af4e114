# SPDX-License-Identifier: Apache-2.0
"""What a move is said to have cost agrees with the job's own step log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest
from lab_session import AS_EVER, LONG, LabSession, NewLab, eventually
from move_bench.steps import AFTER_S, WARM, lost, noise
from moving_job import Job

from liveshift.runtime.cost.prediction import stood
from liveshift.runtime.messages import MigrationRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180), pytest.mark.alone]

NOISE_S = 0.25
"""Two and a half steps of these jobs: their log and their collectives are read at other moments. A
machine with other work is noisier, and by how much the job's own steps before the move tell."""

HELD_S = 1.5
PACE_S = 0.1
"""A rank sleeps so long after each step (LONG), and its sleep ends also while it is stopped. A stop
that falls into the sleep costs the job so much less than it lasts."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", *AS_EVER)


@pytest.fixture(scope="module")
def job(lab: LabSession) -> Iterator[Job]:
    """One job for all moves here: after each it trains on for long enough (costed) that its usual
    rate is known and that there are steps to compare the next one with."""
    job = lab.start("cost", LONG, nnodes=2)
    job.wait_step(100)  # by then its usual rate is known
    yield job
    job.stop()


def costed(lab: LabSession, job: Job, row: MigrationRow) -> MigrationRow:
    """The same move once its cost is known; the job has made steps to hold it against by then."""

    def look() -> MigrationRow | None:
        found = msgspec.convert(lab.json("events", row.name), MigrationRow)
        return found if found.cost else None

    found = eventually(look, "what it cost", 20)
    assert found is not None
    job.go_on(80)  # more than in the move: noise() compares as many with one another
    return found


def by_its_log(job: Job, row: MigrationRow, rank: int = 0) -> tuple[float, float]:
    """What the job lost, and how far off that can be; seconds. Earlier moves do not count.

    The orchestrator takes the frozen time for lost, at least. The log may show less: a rank of this
    job sleeps after each step, and its sleep ends also while it is frozen.
    """
    earlier = [move.asked + move.seconds + AFTER_S for move in job.moves if move.asked < row.asked]
    times = [step["time"] for step in job.steps(rank) if step["time"] > max(earlier, default=0.0)]
    window = (row.asked, row.asked + row.seconds)
    return max(lost(times, *window), row.frozen_s), NOISE_S + noise(times, *window, times[WARM])


def test_a_moves_cost_is_what_the_step_log_shows(lab: LabSession, job: Job) -> None:
    row = costed(lab, job, job.migrate(1))
    cost = row.cost
    assert cost is not None
    assert cost.why_not == ""
    assert cost.lost_s is not None
    assert cost.paused_s is not None
    assert cost.slower_s is not None
    seen, unsure = by_its_log(job, row)
    assert cost.lost_s == pytest.approx(seen, abs=unsure)
    assert cost.lost_s == pytest.approx(cost.paused_s + cost.slower_s)
    assert 0 < cost.paused_s <= stood(row) + 1e-9
    assert cost.empty_s == pytest.approx(row.seconds)
    # Both agents worked: CRIU alone takes that much, and the memory went over.
    assert 0.02 < (cost.cpu_source_s or 0) < 60
    assert 0.02 < (cost.cpu_destination_s or 0) < 60
    assert cost.memory_bytes > 50 << 20
    assert cost.sent_bytes > 10 << 20
    told = lab.cli("events", row.name).out
    assert f"cost {cost.lost_s:.1f} s of training: paused" in told
    (line,) = [e["text"] for e in lab.json("events", "cost") if e["kind"] == "cost"]
    assert line in told


def test_what_holds_a_job_up_beside_the_pause_is_slower(lab: LabSession, job: Job) -> None:
    """The other rank stands for a while just after the move: the job loses that, and not in the
    pause."""
    other = job.seen(0)
    row = job.migrate(1)
    began = time.monotonic()
    for pid in other.tasks.values():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(max(0.0, HELD_S - (time.monotonic() - began)))
    for pid in other.tasks.values():
        os.kill(pid, signal.SIGCONT)
    row = costed(lab, job, row)
    assert row.cost is not None
    assert row.cost.lost_s is not None, row.cost.why_not
    assert row.cost.slower_s is not None
    seen, unsure = by_its_log(job, row)
    assert row.cost.lost_s == pytest.approx(seen, abs=unsure)
    assert row.cost.slower_s > HELD_S - 2 * PACE_S - unsure, "the pause may fall into one, too"


@pytest.mark.long
def test_a_second_move_in_the_same_time_leaves_the_first_without_a_cost(
    lab: LabSession, job: Job
) -> None:
    first = job.migrate(1)
    job.migrate(0)
    row = costed(lab, job, first)
    assert row.cost is not None
    assert row.cost.lost_s is None
    assert "another move of the job, m" in row.cost.why_not
    assert row.cost.empty_s == pytest.approx(row.seconds)
