# SPDX-License-Identifier: Apache-2.0
"""``liveshift status``: shows jobs, capsules, hosts, and what is moving."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import Unreachable, no_such
from ..show import render
from .options import AsLayout, Layout, OpenClient, job_names, with_client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...runtime.messages import Status
    from ..client.client import Client

EVERY_S = 1.0

EXAMPLES = """\
[bold]Examples[/]

liveshift status --watch

liveshift status gpt -o json | jq '.jobs[0].capsules[].host'
"""


@with_client
def status(
    open_client: OpenClient,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Only this job; exit code 4 if there is none of that name.",
            autocompletion=job_names,
            show_default=False,
        ),
    ] = None,
    output: AsLayout = Layout.TABLE,
    every: Annotated[bool, typer.Option("--all", "-a", help="All ended jobs, too.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every second until Ctrl-C.")
    ] = False,
) -> None:
    """Show jobs, capsules, hosts and what is moving: moving and running jobs first, of the ended
    ones the last few. On a terminal --watch shows what fits on it."""
    with open_client() as client:
        if not watch:
            _print(_get_status(client, job), output, every, one=bool(job))
        elif output is not Layout.JSON and sys.stdout.isatty():
            _live(client, job, output, every)
        else:
            while True:
                _print(_get_status(client, job), output, every, one=bool(job))
                time.sleep(EVERY_S)


def _get_status(client: Client, job: str | None) -> Status:
    """Return the state of the cluster, or of one job in it. Raises NotFound for an unknown job."""
    import msgspec

    from ...runtime.messages import GetStatus, Status
    from ..show import moves

    status = client.get(Status, GetStatus(job or ""))
    if job and not status.jobs:
        known = [each.name for each in client.get(Status, GetStatus()).jobs]
        text = f'no job "{job}" in the cluster {status.cluster}'
        raise no_such(text, job, known, "its jobs are")
    current = [moves.get_migration(client, row.name) for row in status.moving]
    return msgspec.structs.replace(status, moving=current)


def _print(status: Status, output: Layout, every: bool, *, one: bool) -> None:
    if output is Layout.JSON:
        render.print_json(status)
        return
    from ..show.status_tables import parts
    from ..show.status_view import chosen

    shown, hidden = chosen(status, every=every)
    render.show(*parts(shown, wide=output is Layout.WIDE, hidden=hidden, one=one))


def _live(client: Client, job: str | None, output: Layout, every: bool) -> None:
    """Keep one picture on the terminal up to date. While no daemon answers, it says so and tries
    again."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ..show.status_view import chosen, fitting

    console, wide = render.out(), output is Layout.WIDE

    def render_now() -> RenderableType:
        found = chosen(_get_status(client, job), every=every)
        return fitting(*found, console, wide=wide, one=bool(job))

    picture = render_now()
    with Live(picture, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            try:
                picture = render_now()
                live.update(picture, refresh=True)
            except Unreachable as error:
                away = Text(f"no contact: {error}; trying again", style="red")
                live.update(Group(picture, away), refresh=True)
