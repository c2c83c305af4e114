# SPDX-License-Identifier: Apache-2.0
"""A job with snapshots: what is known of them, and what it takes to have lost nothing."""

from __future__ import annotations

from lab_session import eventually
from moving_job import Job

from liveshift.runtime.messages import Event


def events(job: Job, kind: str) -> list[Event]:
    return [event for event in job.session.history(job.name) if event.kind == kind]


def wait_protected(job: Job) -> None:
    """Wait for a snapshot of after now whose holders fit."""
    before = job.protection().newest

    def taken() -> bool:
        row = job.protection()
        return row.newest != before and not row.why_not

    eventually(taken, "a snapshot that would do", 60)


def wait_rewound(job: Job, times: int) -> None:
    eventually(lambda: len(events(job, "rewound")) == times, f"rewind {times}")
