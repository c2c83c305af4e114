# SPDX-License-Identifier: Apache-2.0
"""Chooses what of a cluster is shown: what runs first, few ended jobs, what a screen can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType

from .status_tables import Most, parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...runtime.messages import HostRow, JobRow, Status

ENDED_SHOWN = 3
"""This many ended jobs are shown without ``--all``."""

FEWEST = 3
"""Even the smallest screen shows this many lines of jobs, and of hosts. Of moves it shows one."""


def chosen(status: Status, *, every: bool = False) -> tuple[Status, int]:
    """Return the status with the jobs to show, and how many ended jobs are left out. Jobs with a
    capsule on the move come first, then those that run, then the ended ones that began last."""
    moving = [job for job in status.jobs if _moves(job)]
    running = [job for job in status.jobs if job.state != "ended" and not _moves(job)]
    ended = [job for job in reversed(status.jobs) if job.state == "ended"]
    shown = ended if every else ended[:ENDED_SHOWN]
    jobs = [*moving, *running, *shown]
    return msgspec.structs.replace(status, jobs=jobs), len(ended) - len(shown)


def fitting(
    status: Status, hidden: int, console: Console, *, wide: bool, one: bool = False
) -> RenderableType:
    """Return as much as the console has lines for. Jobs are cut first, then hosts, then moves, each
    at their end. The jobs and hosts that need the least attention come last. ``one``: as in
    :func:`.status_tables.parts`."""

    def picture(most: Most) -> Group:
        return Group(*parts(status, wide=wide, hidden=hidden, most=most, one=one))

    status = msgspec.structs.replace(status, hosts=sorted(status.hosts, key=_calm(status)))
    jobs = sum(1 + len(job.capsules) for job in status.jobs)
    most = Most(jobs, len(status.moving), len(status.hosts))
    while (over := _height(picture(most), console) - console.height) > 0:
        if most.jobs > FEWEST:
            most = most._replace(jobs=max(FEWEST, most.jobs - over))
        elif most.hosts > FEWEST:
            most = most._replace(hosts=max(FEWEST, most.hosts - over))
        elif most.moves > 1:  # each move has a row, and mostly a line below the table
            most = most._replace(moves=max(1, most.moves - max(1, over // 2)))
        else:
            break
    return picture(most)


def _calm(status: Status) -> Callable[[HostRow], bool]:
    """Return the sort key by which hosts with a move, a taint or a cordon, and lost ones, come
    first."""
    involved = {name for row in status.moving for name in (row.source, row.destination)}

    def key(host: HostRow) -> bool:
        return (
            host.state == "up"
            and host.taint is None
            and host.cordon is None
            and host.name not in involved
        )

    return key


def _moves(job: JobRow) -> bool:
    return any(capsule.state == "moving" for capsule in job.capsules)


def _height(picture: Group, console: Console) -> int:
    return len(console.render_lines(picture, pad=False))
