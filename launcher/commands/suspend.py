# SPDX-License-Identifier: Apache-2.0
"""``liveshift suspend`` and ``liveshift resume``: a job leaves all hosts, and comes back."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import WrongUsage
from ..show import job_events, job_order
from .options import AsTableOrJson, Job, OpenClient, TableOrJson, with_client

SUSPEND_EXAMPLES = """\
[bold]Examples[/]

liveshift suspend gpt   [dim]# you need its hosts for another job[/]

liveshift resume gpt   [dim]# later gpt goes on where it was, on any hosts with room[/]

liveshift suspend gpt --to /nfs/liveshift   [dim]# you want to switch all machines off[/]
"""

RESUME_EXAMPLES = """\
[bold]Examples[/]

liveshift resume gpt --dry-run   [dim]# on which hosts would it run?[/]

liveshift resume gpt

liveshift resume gpt --from /nfs/liveshift   [dim]# all machines were switched off meanwhile[/]
"""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say where.")]


@with_client
def suspend(
    open_client: OpenClient,
    job: Job,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="DIR",
            help="Save its images in a directory that all hosts see and that root alone can change;"
            " no memory is needed for them then. This takes the role operate.",
            show_default=False,
        ),
    ] = "",
    dry_run: DryRun = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it runs nowhere, or at once.")
    ] = True,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """Let a whole job leave its hosts: its slots are free then, and no progress is lost.

    The job is stopped at a boundary, and the image of each of its capsules goes into the memory of
    a host that runs none of them. If the suspension fails before its end, the job trains on.
    `liveshift resume` lets the job go on from exactly there. The image lasts as long as the hosts
    that hold it run: `liveshift status JOB -o wide` names them. With --to it is saved in a
    directory, and outlives them. For a job that is suspended already, --to saves its image.

    It waits for the job's moves; a move that begins before its image is whole goes first. Ctrl-C
    takes the order back while it waits.

    Exit code 5 if it cannot be suspended now, or if no host can hold it; 1 if it is suspended, but
    could not be saved.
    """
    from ...runtime.messages import SuspendJob, SuspensionOrdered

    as_json = output is TableOrJson.JSON
    with open_client() as client:
        last = job_events.last(client, job)
        ordered = client.get(SuspensionOrdered, SuspendJob(job, to, dry_run))
        about = {"job": job, "holders": ordered.holders}
        if dry_run or not wait:
            holders = ", ".join(dict.fromkeys(ordered.holders.values()))
            text = f"would go into the memory of {holders}" if dry_run else "is being suspended"
            if after := job_order.waiting(ordered.waits_for):
                text = f"would be suspended{after}" if dry_run else f"is suspended{after}"
            job_order.say(about, "running" if dry_run else "suspending", text, as_json=as_json)
            return
        text = job_order.follow(client, job, last, "suspended", quiet=as_json)
    job_order.say(about, "suspended", text, as_json=as_json)


@with_client
def resume(
    open_client: OpenClient,
    job: Job,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR",
            help="The directory in which `suspend` or `snapshot` has saved it; a suspended job"
            " knows its own. This takes the role operate.",
            show_default=False,
        ),
    ] = "",
    snapshot: Annotated[
        str,
        typer.Option(
            "--snapshot",
            metavar="NAME",
            help="Which one of those in DIR, such as s17; the newest by default.",
            show_default=False,
        ),
    ] = "",
    dry_run: DryRun = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it runs again, or at once.")
    ] = True,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """Let a suspended or saved job go on, on any hosts that have room for it.

    Its processes go on from the boundary at which they were stopped, on the same addresses. A host
    that holds a capsule's image takes that capsule if it has a free slot. Images that were saved
    in a directory are loaded from there.

    With --from, JOB may be a job that has ended, or that this cluster has never had. The directory
    must have been written by this cluster or by one that it trusts (`liveshift keys trust`). If a
    job that is saved in one cluster still runs there, it trains twice.

    Exit code 5 if the job still runs, if there is no room, or if the directory is not trusted: a
    suspended job stays suspended then.
    """
    from ...runtime.messages import ResumeJob, ResumptionOrdered

    if snapshot and not source:
        raise WrongUsage("--snapshot names one of those in a directory", hint="add --from DIR")

    as_json = output is TableOrJson.JSON
    with open_client() as client:
        last = job_events.last(client, job)
        ordered = client.get(ResumptionOrdered, ResumeJob(job, source, dry_run, snapshot))
        about = {
            "job": job,
            "snapshot": ordered.snapshot,
            "suspended_s": ordered.suspended_s,
            "where": ordered.where,
        }
        where = ", ".join(f"{capsule} on {host}" for capsule, host in ordered.where.items())
        if dry_run or not wait:
            text = f"would go on: {where}" if dry_run else f"is being resumed: {where}"
            job_order.say(about, "suspended" if dry_run else "resuming", text, as_json=as_json)
            return
        text = job_order.follow(client, job, last, "resumed", quiet=as_json)
    job_order.say(about, "running", text, as_json=as_json)
