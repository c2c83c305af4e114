# SPDX-License-Identifier: Apache-2.0
"""``liveshift suspend`` and ``liveshift resume``: a job leaves all hosts, and comes back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError
from ..show import job_events, render
from .options import AsTableOrJson, Job, OpenClient, TableOrJson, with_client

if TYPE_CHECKING:
    from ..client.client import Client

LOOK_S = 0.2

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

    Exit code 5 if it cannot be suspended now, or if no host can hold it; 1 if it is suspended, but
    could not be saved.
    """
    from ...runtime.messages import SuspendJob, SuspensionOrdered

    with open_client() as client:
        last = job_events.last(client, job)
        ordered = client.get(SuspensionOrdered, SuspendJob(job, to, dry_run))
        about = {"job": job, "holders": ordered.holders}
        if dry_run or not wait:
            holders = ", ".join(dict.fromkeys(ordered.holders.values()))
            text = f"would go into the memory of {holders}" if dry_run else "is being suspended"
            _say(about, "running" if dry_run else "suspending", text, output)
            return
        text = _follow(client, job, last, "suspended", quiet=output is TableOrJson.JSON)
    _say(about, "suspended", text, output)


@with_client
def resume(
    open_client: OpenClient,
    job: Job,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Where the images are, if not where `suspend --to` has saved them. This takes the"
            " role operate.",
            show_default=False,
        ),
    ] = "",
    dry_run: DryRun = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it runs again, or at once.")
    ] = True,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """Let a suspended job go on, on any hosts that have room for it.

    Its processes go on from the boundary at which they were stopped, on the same addresses. A host
    that holds a capsule's image takes that capsule if it has a free slot. Images that were saved
    in a directory are loaded from there.

    Exit code 5 if the job is not suspended, or if there is no room: then it stays suspended.
    """
    from ...runtime.messages import ResumeJob, ResumptionOrdered

    with open_client() as client:
        last = job_events.last(client, job)
        ordered = client.get(ResumptionOrdered, ResumeJob(job, source, dry_run))
        about = {
            "job": job,
            "snapshot": ordered.snapshot,
            "suspended_s": ordered.suspended_s,
            "where": ordered.where,
        }
        where = ", ".join(f"{capsule} on {host}" for capsule, host in ordered.where.items())
        if dry_run or not wait:
            text = f"would go on: {where}" if dry_run else f"is being resumed: {where}"
            _say(about, "suspended" if dry_run else "resuming", text, output)
            return
        text = _follow(client, job, last, "resumed", quiet=output is TableOrJson.JSON)
    _say(about, "running", text, output)


def _follow(client: Client, job: str, last: int, done: str, *, quiet: bool) -> str:
    """Wait until the job is ``done``, and print what happens meanwhile; return how it went."""
    under_way, unsaved = {"suspended": "suspending", "resumed": "resuming"}[done], ""
    try:
        while True:
            for event in job_events.after(client, job, last):
                last = event.number
                if event.subject != job:
                    continue
                if event.kind == "not saved":
                    unsaved = event.text
                if event.kind == done and unsaved:
                    raise LiveshiftError(
                        f"{job} {unsaved}", hint=f"it is suspended all the same: it {event.text}"
                    )
                if event.kind == done:
                    return event.text
                if event.kind in (f"not {done}", "ended"):
                    raise LiveshiftError(f"{job} was not {done}: {event.text}")
                if event.kind == under_way and not quiet:
                    render.note(f"{job}: {event.text}")
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        render.note(f"{job} is {under_way} all the same: `liveshift events {job}` shows it")
        raise


def _say(about: Mapping[str, object], state: str, text: str, output: TableOrJson) -> None:
    if output is TableOrJson.JSON:
        render.print_json({**about, "state": state, "text": text})
    else:
        render.out().print(f"{about['job']} {text}", soft_wrap=True)
