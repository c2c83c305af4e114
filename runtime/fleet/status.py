# SPDX-License-Identifier: Apache-2.0
"""Builds the rows that `liveshift status` shows from what the orchestrator knows."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...texts import shortened
from ..messages import CapsuleRow, HostRow, JobRow, ProtectionRow, Status, UnknownRow
from ..model.jobs import Capsule, Job
from ..model.spares import HostView
from ..snapshot.protection_row import Seen, row
from .fleet import Fleet


def _journal_problem(fleet: Fleet) -> str:
    if waits := fleet.unreported():
        return f"the journal was put back from a backup, and waits for {', '.join(waits)} to report"
    return fleet.journal.file.problem


def status(fleet: Fleet, sees: Callable[[Job], bool], *, sees_all: bool, only: str = "") -> Status:
    """Return all hosts, and the jobs and current migrations that the caller may see. ``only``: just
    the job of that name, its migrations, and the hosts that its capsules belong to."""
    visible = [job for job in fleet.jobs.values() if sees(job)]
    jobs = [job for job in visible if only in ("", job.name)]
    running = [job for job in jobs if job.state != "suspended"]
    theirs = {capsule.host for job in running for capsule in job.capsules.values()}
    now, views = time.time(), fleet.views()  # once: there may be a thousand of hosts and of jobs
    seen, failures = Seen(views), fleet.failures.seen
    return Status(
        cluster=fleet.cluster.name,
        time=now,
        jobs=[_job(fleet, job, row(job, fleet.cluster, seen, now, failures)) for job in jobs],
        hosts=_hosts(
            fleet,
            views,
            {capsule for job in visible for capsule in job.capsules},
            lambda host: not only or host in theirs,
        ),
        moving=[
            each.row()
            for each in fleet.under_way()
            if only in ("", each.job.name) and sees(each.job)
        ],
        trouble=_journal_problem(fleet),
        unknown=_unknown(fleet) if sees_all else [],
    )


def _unknown(fleet: Fleet) -> list[UnknownRow]:
    return [
        UnknownRow(shortened(seen.name), host, seen.pids, seen.resident, shortened(seen.command))
        for host, found in fleet.unknown.items()
        for seen in found
    ]


def _job(fleet: Fleet, job: Job, protection: ProtectionRow | None) -> JobRow:
    rows = [_capsule(job, c, fleet.is_up(c.host)) for c in job.capsules.values()]
    running = [row.rate for row in rows if row.code is None]
    return JobRow(
        name=job.name,
        state=job.state,
        command=shortened(" ".join(job.request.argv)),
        user=job.uid,
        started=job.started,
        rate=min(running, default=0.0),
        code=job.code,
        capsules=rows,
        protection=protection,
    )


def _capsule(job: Job, capsule: Capsule, host_up: bool) -> CapsuleRow:
    seen = capsule.seen
    if capsule.code is not None:
        state = "ended"
    elif job.state == "suspended":
        state = "suspended"
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
        host="" if state == "suspended" else capsule.host,
        epoch=capsule.epoch,
        address=job.overlay.address(capsule.index),
        ranks=seen.ranks if seen else [],
        pids=alive.pids if alive else 0,
        resident=alive.resident if alive else 0,
        collectives=seen.collectives if seen else 0,
        rate=alive.rate if alive else 0.0,
        code=capsule.code,
        migration=capsule.migration,
        output_trouble=alive.output_trouble if alive else "",
    )


def _hosts(
    fleet: Fleet, views: list[HostView], shown: set[str], wanted: Callable[[str], bool]
) -> list[HostRow]:
    rows, held = [], fleet.held()
    for view, host in zip(views, fleet.cluster.hosts, strict=True):
        if not wanted(host.name):
            continue
        reason, by = fleet.taints.get(host.name, (None, None))
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
                cordon=fleet.cordons.get(host.name),
                memory_free=fleet.hosts[host.name].memory_free,
                capsules=[name for name in held.get(host.name, ()) if name in shown],
                gpus=list(view.gpus),
                link=fleet.hosts[host.name].link,
                other_file=fleet.hosts[host.name].digest not in ("", fleet.cluster.digest),
            )
        )
    return rows
