# SPDX-License-Identifier: Apache-2.0
"""What `liveshift status` shows: the orchestrator's view as rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .jobs import Capsule, Job
from .messages import CapsuleRow, HostRow, JobRow, Status
from .steps import ENDS

if TYPE_CHECKING:
    from .orchestrator import Orchestrator


def status(o: Orchestrator) -> Status:
    """All jobs, hosts and the migrations in flight, as of now."""
    return Status(
        cluster=o.cluster.name,
        time=time.time(),
        jobs=[_job(o, job) for job in o.jobs.values()],
        hosts=_hosts(o),
        moving=[move.row() for move in o.moves.values() if move.step not in ENDS],
    )


def _job(o: Orchestrator, job: Job) -> JobRow:
    rows = [_capsule(job, c, o.is_up(c.host)) for c in job.capsules.values()]
    running = [row.rate for row in rows if row.code is None]
    return JobRow(
        name=job.name,
        state=job.state,
        command=" ".join(job.request.argv),
        user=job.uid,
        started=job.started,
        rate=min(running, default=0.0),
        code=job.code,
        capsules=rows,
    )


def _capsule(job: Job, capsule: Capsule, host_up: bool) -> CapsuleRow:
    seen = capsule.seen
    if capsule.code is not None:
        state = "ended"
    elif capsule.migration:
        state = "moving"
    elif not host_up:
        state = "unknown"
    else:
        state = "running" if seen else "starting"
    alive = seen if state != "ended" else None
    return CapsuleRow(
        name=capsule.name,
        index=capsule.index,
        state=state,
        host=capsule.host,
        epoch=capsule.epoch,
        address=job.overlay.address(capsule.index),
        ranks=seen.ranks if seen else [],
        pids=alive.pids if alive else 0,
        resident=alive.resident if alive else 0,
        collectives=seen.collectives if seen else 0,
        rate=alive.rate if alive else 0.0,
        code=capsule.code,
        migration=capsule.migration,
    )


def _hosts(o: Orchestrator) -> list[HostRow]:
    rows = []
    for view, host in zip(o.host_views(), o.cluster.hosts, strict=True):
        here = [
            capsule.name
            for job in o.jobs.values()
            for capsule in job.capsules.values()
            if capsule.host == host.name and capsule.code is None
        ]
        # A move that has been committed but is not over still holds its frozen copy here.
        here += [
            move.capsule.name
            for move in o.moves.values()
            if move.step not in ENDS and move.source == host.name != move.capsule.host
        ]
        reason, by = o.taints.get(host.name, (None, None))
        rows.append(
            HostRow(
                name=host.name,
                address=host.address,
                state="up" if view.up else "lost",
                spare=view.spare,
                slots=view.slots,
                used=view.used,
                taint=reason,
                taint_by=by,
                memory_free=o.hosts[host.name].memory_free,
                capsules=here,
            )
        )
    return rows
