# SPDX-License-Identifier: Apache-2.0
"""``liveshift rewind``: takes a job back to its newest snapshot."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError, WrongUsage
from ..show import job_events, render
from .options import AsTableOrJson, Job, OpenClient, TableOrJson, host_names, with_client

if TYPE_CHECKING:
    from ...runtime.messages import RewindOrdered
    from ..client.client import Client

LOOK_S = 0.2

EXAMPLES = """\
[bold]Examples[/]

liveshift rewind gpt   [dim]# its data service was down, and it trained on nothing[/]

liveshift rewind gpt --lost h1   [dim]# no host of gpt is heard, and h1 certainly has no power[/]
"""


@with_client
def rewind(
    open_client: OpenClient,
    job: Job,
    lost: Annotated[
        str,
        typer.Option(
            "--lost",
            metavar="HOST",
            help="You know that this silent host of the job is dead. If it is not, the job may"
            " train twice.",
            autocompletion=host_names,
            show_default=False,
        ),
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; needed where stdin is no terminal.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it runs again, or at once.")
    ] = True,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """Take a job back to its newest snapshot: what it has trained since is lost, and is repeated.

    A job with a lost host or a killed rank is taken back without this command. Only where all of
    its hosts are silent, liveshift waits: they may be well, and only cut off. Then --lost says
    which of them is certainly dead.

    Exit code 5 if the job has no complete snapshot, or cannot be taken back now.
    """
    from ...runtime.messages import RewindJob, RewindOrdered

    with open_client() as client:
        if not yes:
            plan = client.get(RewindOrdered, RewindJob(job, lost, dry_run=True))
            _confirm(plan, lost)
        last = job_events.last(client, job)
        ordered = client.get(RewindOrdered, RewindJob(job, lost))
        if not wait:
            _say(ordered, "ordered", "is being taken back", output)
            return
        try:
            text = _follow(client, ordered, last, quiet=output is TableOrJson.JSON)
        except KeyboardInterrupt:
            render.note(f"the rewind goes on without this command: `liveshift events {job}`")
            raise
    _say(ordered, "rewound", text, output)


def _confirm(plan: RewindOrdered, lost: str) -> None:
    """Say what would be done and ask. Raises WrongUsage where stdin is no terminal, typer.Abort at
    a no."""
    if not sys.stdin.isatty():
        raise WrongUsage(
            f"rewind {plan.job}: stdin is no terminal, so there is no way to ask",
            hint=f"--yes takes {plan.job} back {plan.ago:.0f} s, to {plan.snapshot}",
        )
    where = ", ".join(f"{capsule} on {host}" for capsule, host in plan.where.items())
    render.note(
        f"{plan.job} would go back {plan.ago:.0f} s, to {plan.snapshot} ({plan.boundary}): {where}"
    )
    if lost:
        render.note(f"if {lost} is not dead, {plan.job} may train twice and spoil its files")
    sys.stderr.write(f"Take {plan.job} back? [y/N] ")  # stdout is for the result
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def _follow(client: Client, ordered: RewindOrdered, last: int, *, quiet: bool) -> str:
    """Wait until the job runs again, and print what happens meanwhile; return how it went."""
    until = time.monotonic() + ordered.within if ordered.within else float("inf")
    while True:
        for event in job_events.after(client, ordered.job, last):
            last = event.number
            if event.subject != ordered.job:
                continue
            if event.kind == "rewound":
                return event.text
            if event.kind in ("ended", "not rewound"):
                raise LiveshiftError(f"{ordered.job} was not taken back: {event.text}")
            if event.kind == "rewinding":
                until = float("inf") if event.text.startswith("goes back") else until
                if not quiet:
                    render.note(f"{ordered.job} {event.text}")
        if time.monotonic() > until:
            raise LiveshiftError(
                f"{ordered.job} was not taken back within {ordered.within:g} s, and the order is"
                " void now",
                hint=f"`liveshift events {ordered.job}` says why",
            )
        time.sleep(LOOK_S)


def _say(ordered: RewindOrdered, state: str, text: str, output: TableOrJson) -> None:
    if output is TableOrJson.JSON:
        found = {"job": ordered.job, "state": state, "snapshot": ordered.snapshot}
        render.print_json(found | {"ago": ordered.ago, "where": ordered.where, "text": text})
    else:
        render.out().print(f"{ordered.job} {text}", soft_wrap=True)
