# SPDX-License-Identifier: Apache-2.0
"""``liveshift snapshot``: a checkpoint of a whole job in a directory, without the job's help."""

from __future__ import annotations

from typing import Annotated

import typer

from ..show import job_events, job_order
from .options import AsTableOrJson, Job, OpenClient, TableOrJson, with_client

EXAMPLES = """\
[bold]Examples[/]

liveshift snapshot gpt --to /nfs/liveshift   [dim]# gpt trains on[/]

liveshift resume gpt --from /nfs/liveshift   [dim]# later, once gpt has ended; on any hosts[/]
"""


@with_client
def snapshot(
    open_client: OpenClient,
    job: Job,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="DIR",
            help="A directory that all hosts see and that root alone can change.",
            show_default=False,
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether it can be.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it is saved, or at once.")
    ] = True,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """Save a snapshot of a whole job in a directory, while the job trains on.

    The job is paused at a boundary for as long as for any snapshot. Its images go into the memory
    of other hosts first, which then write them into the directory: so the job does not wait for the
    disk. `liveshift resume JOB --from DIR` lets the job go on from there, also after its end, after
    all machines were switched off, or in another cluster that trusts this one.

    It waits for the job's moves; a move that begins meanwhile goes first. Ctrl-C takes the order
    back while it waits.

    This takes the role operate. Exit code 5 if no snapshot can be taken now, 1 if it fails: the job
    trains on then, and the directory has nothing of it.
    """
    from ...runtime.messages import SnapshotJob, SnapshotOrdered

    as_json = output is TableOrJson.JSON
    with open_client() as client:
        last = job_events.last(client, job)
        ordered = client.get(SnapshotOrdered, SnapshotJob(job, to, dry_run))
        about = {"job": job, "directory": to, "holders": ordered.holders}
        if dry_run or not wait:
            holders = ", ".join(dict.fromkeys(ordered.holders.values()))
            would = f"can be saved: its images would go through the memory of {holders}"
            text, state = (would, "running") if dry_run else ("is being saved", "saving")
            if after := job_order.waiting(ordered.waits_for):
                text = f"can be saved{after}" if dry_run else f"is saved{after}"
            job_order.say(about, state, text, as_json=as_json)
            return
        text = job_order.follow(client, job, last, "saved", quiet=as_json)
    job_order.say(about, "saved", f"is saved: {text}", as_json=as_json)
