# SPDX-License-Identifier: Apache-2.0
"""What of a cluster's state is shown: what runs first, few ended jobs, and what a screen holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType

from .status_tables import Most, parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...runtime.messages import HostRow, JobRow, Status

ENDED_SHOWN = 3
"""Ended jobs that are shown without ``--all``."""

FEWEST = 3
"""Lines of jobs, and of hosts, that even the smallest screen shows; of moves it shows one."""


def chosen(status: Status, *, every: bool = False) -> tuple[Status, int]:
    """Jobs with a capsule on the move first, then those that run, then the ended ones that began
    last; and how many of the latter are left out."""
    moving = [job for job in status.jobs if _moves(job)]
    running = [job for job in status.jobs if job.state != "ended" and not _moves(job)]
    ended = [job for job in reversed(status.jobs) if job.state == "ended"]
    shown = ended if every else ended[:ENDED_SHOWN]
    jobs = [*moving, *running, *shown]
    return msgspec.structs.replace(status, jobs=jobs), len(ended) - len(shown)


def fitting(status: Status, hidden: int, console: Console, *, wide: bool) -> RenderableType:
    """As much as the console has lines for. First jobs are cut, then hosts, then moves, at their
    ends; of jobs and hosts those come last of which least is to be said."""

    def picture(most: Most) -> Group:
        return Group(*parts(status, wide=wide, hidden=hidden, most=most))

    status = msgspec.structs.replace(status, hosts=sorted(status.hosts, key=_calm(status)))
    jobs = sum(1 + len(job.capsules) for job in status.jobs)
    most = Most(jobs, len(status.moving), len(status.hosts))
    while (over := _height(picture(most), console) - console.height) > 0:
        if most.jobs > FEWEST:
            most = most._replace(jobs=max(FEWEST, most.jobs - over))
        elif most.hosts > FEWEST:
            most = most._replace(hosts=max(FEWEST, most.hosts - over))
        elif most.moves > 1:  # each has a row, and mostly a line below the table
            most = most._replace(moves=max(1, most.moves - max(1, over // 2)))
        else:
            break
    return picture(most)


def _calm(status: Status) -> Callable[[HostRow], bool]:
    """The key by which hosts with a move, a taint or a cordon, and lost ones, come first."""
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
