# SPDX-License-Identifier: Apache-2.0
"""A job with snapshots: what is known of them, the steps that it repeats, and what it takes to have
lost nothing."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from functools import partial

from lab_session import eventually
from moving_job import AFTER, Job, Step

from liveshift.runtime.messages import Event


def events(job: Job, kind: str) -> list[Event]:
    return [event for event in job.session.history(job.name) if event.kind == kind]


def kill_rank(job: Job, rank: int) -> None:
    """End the only process of a rank by SIGKILL."""
    (pid,) = set(job.seen(rank).tasks.values())
    os.kill(pid, signal.SIGKILL)


def wait_protected(job: Job) -> None:
    """Wait for a snapshot of after now whose holders fit."""
    before = job.protection().newest

    def taken() -> bool:
        row = job.protection()
        return row.newest != before and not row.why_not

    eventually(taken, "a snapshot that would do", 60)


def wait_rewound(job: Job, times: int) -> None:
    eventually(lambda: len(events(job, "rewound")) == times, f"rewind {times}")


def steps(job: Job, rank: int) -> list[Step]:
    """The steps that are whole in the rank's file."""
    found = []
    for line in (job.out / f"rank{rank}.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [step for step in found if isinstance(step, dict) and "sha256" in step]


def steps_since(job: Job, rank: int, since: float) -> list[float]:
    """When the steps of after that time were made, in order."""
    return sorted(step["time"] for step in steps(job, rank) if step["time"] > since)


def wait_steps(job: Job, since: float, count: int) -> None:
    """Wait until both ranks have made so many steps after that time."""
    for rank in range(2):
        eventually(partial(_has_steps, job, rank, since, count), f"steps of rank {rank}")


def _has_steps(job: Job, rank: int, since: float, count: int) -> bool:
    return len(steps_since(job, rank, since)) >= count


def wait_past(job: Job, before: int) -> None:
    """Wait until the job is further than it was before the rewind, at ``before`` steps."""
    eventually(lambda: len(steps(job, 0)) > before + 2 * AFTER, "the job to be further than ever")
