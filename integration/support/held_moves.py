# SPDX-License-Identifier: Apache-2.0
"""Moves that are held at a point of their way, while a test does harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fault_matrix.held import Held
from moving_job import Job

HASTY = ("--timeouts", "collective=120,heartbeat=0.3,suspicion=1.5,grace=1")
"""Of ``lab up``: a daemon that dies is missed soon."""

GoOn = Callable[[], tuple[int, str]]


@contextmanager
def held_at(points: Held, point: str, job: Job, *words: str, capsule: int = 0) -> Iterator[GoOn]:
    """``liveshift migrate`` of a capsule of the job, once it has come to the point.

    What is given lets it go on, and tells the command's exit status and what it said.
    """
    points.arm(point)
    with job.session.popen("migrate", f"{job.name}/{capsule}", *words) as moving:

        def go_on() -> tuple[int, str]:
            points.release(point)
            _, err = moving.communicate(timeout=120)
            return moving.returncode, " ".join(err.decode().split())

        try:
            points.wait(point)
            yield go_on
        finally:
            moving.kill()


@contextmanager
def interrupted(points: Held, point: str, job: Job, *words: str) -> Iterator[None]:
    """The same, to do harm there; it goes on afterwards, and is over in the end."""
    count = len(job.migrations())
    with held_at(points, point, job, *words) as go_on:
        yield
        go_on()
    job.migration_after(count, timeout=90)
