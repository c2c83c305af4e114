# SPDX-License-Identifier: Apache-2.0
"""Why a person's order to rewind a job is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...errors import Refused
from ..model.jobs import Job


def cannot(job: Job, why: str, hint: str = "") -> Refused:
    """The refusal of an order; ``why``: in words, "" if the state of the job says enough."""
    states = {
        "ending": "it is being ended",
        "ended": "it has ended",
        "suspended": "it is suspended",
    }
    reason = states.get(job.state) or why or "one of its capsules has ended"
    shows = f"`liveshift status {job.name} -o wide` shows its snapshots"
    return Refused(f"{job.name} cannot be taken back: {reason}", hint=hint or shows)


def check_lost(job: Job, lost: str, hosts: Collection[str], answers: Callable[[str], bool]) -> None:
    """Raise Refused if ``lost`` cannot be taken for dead. ``hosts``: those that have or had a
    capsule of the job. ``answers``: whether a host, or its kernel, has been heard."""
    if lost not in hosts:
        raise Refused(
            f"--lost {lost}: {job.name} does not run there",
            hint=f"its hosts are {', '.join(sorted(hosts))}",
        )
    if answers(lost):
        raise Refused(
            f"--lost {lost}: it is not dead, it answers",
            hint=f"`liveshift drain {lost}` moves what runs there;"
            f" `liveshift rewind {job.name}` takes the job back where it is",
        )
