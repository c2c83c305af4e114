# SPDX-License-Identifier: Apache-2.0
"""``liveshift events``: shows what happened, when, and who asked for it."""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import NotFound
from ...texts import one_line
from ..show import render
from .options import AsLayout, Layout, OpenClient, any_names, duration, with_client

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...runtime.messages import Event, MigrationRow, Phase
    from ..client.client import Client

EXAMPLES = """\
[bold]Examples[/]

liveshift events gpt --wide

liveshift events m3   [dim]# one migration: its phases, seconds and bytes[/]

liveshift events h1 --since 2h --follow
"""

MIGRATION = re.compile(r"m[0-9]+")
LOOK_S = 1.0  # seconds between two looks at the history that is followed


@with_client
def events(
    open_client: OpenClient,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="[SUBJECT]",
            help="A job, capsule, host, or one migration with its phases.",
            autocompletion=any_names,
            show_default=False,
        ),
    ] = "",
    output: AsLayout = Layout.TABLE,
    wide: Annotated[
        bool, typer.Option("--wide", help="Also the phases of each migration: -o wide.")
    ] = False,
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Only what happened in the last 90s, 5m, 2h …"
        ),
    ] = "",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Go on with what happens; of one migration until it is over."
        ),
    ] = False,
) -> None:
    """Show the history: who asked for what, how long it took, how it ended."""
    after = time.time() - duration(since) if since else 0.0
    with open_client() as client:
        every, unknown = _events(client, subject)
        names = {event.migration.name if event.migration else "" for event in every}
        alone = unknown or (MIGRATION.fullmatch(subject) and names <= {subject})
        migration = _migration(client, subject, unknown) if alone else None
        found = [event for event in every if event.time >= after]
        if migration is not None and follow:
            from ..show import moves

            migration = moves.follow(client, subject)
        elif follow:
            newest = max((event.number for event in every), default=0)
            _follow(client, subject, found, newest, output)
    if migration is not None:
        _print_migration(migration, output)
    elif output is Layout.JSON:
        render.print_json(found)
    else:
        _print(found, wide=wide or output is Layout.WIDE)


def _follow(client: Client, subject: str, found: list[Event], newest: int, output: Layout) -> None:
    """Print the events that were found and those after number ``newest``, one line each, until
    Ctrl-C."""
    from ...runtime.messages import Events, GetEvents
    from ..show.retry import request

    while True:
        for event in found:
            newest = max(newest, event.number)
            if output is Layout.JSON:
                sys.stdout.write(json.dumps(render.plain(event), ensure_ascii=False) + "\n")
            else:
                who = f"{_time(event.time)}  {event.by or '–':<10}  {event.subject:<10}"
                sys.stdout.write(one_line(f"{who}  {event.text}") + "\n")
        sys.stdout.flush()
        time.sleep(LOOK_S)
        found = request(client, Events, GetEvents(subject, newest)).events


def _events(client: Client, subject: str) -> tuple[list[Event], NotFound | None]:
    """Return the history of a subject and None; for an unknown subject [] and the error."""
    from ...runtime.messages import Events, GetEvents

    try:
        return client.get(Events, GetEvents(subject, 0)).events, None
    except NotFound as error:
        return [], error


def _migration(client: Client, name: str, unknown: NotFound | None) -> MigrationRow:
    """Return the migration of that name. Raises NotFound if there is none, with the hint of
    ``unknown``, the answer to an earlier request about the name."""
    from ...runtime.messages import GetMigration, MigrationDetails

    try:
        return client.get(MigrationDetails, GetMigration(name)).row
    except NotFound as error:
        raise NotFound(
            f'nothing is known of "{name}": no job, capsule, host or migration of that name',
            hint=unknown.hint if unknown else "`liveshift events` shows all",
        ) from error


def _print_migration(row: MigrationRow, output: Layout) -> None:
    from ..show import forecast, moves

    if output is Layout.JSON:
        render.print_json(row)
        return
    to = render.out()
    asked = (
        f"{row.name}, asked by {row.by or '?'} at {_time(row.asked)}: {row.reason or 'no reason'}"
    )
    to.print(asked, soft_wrap=True)
    render.out(markup=True).print(moves.phase_table(row))
    to.print(moves.sum_up(row), soft_wrap=True)
    if row.cost is not None:
        to.print(moves.cost(row), soft_wrap=True)
    if (expected := forecast.compared(row)) is not None and moves.over(row):
        to.print(forecast.in_short(expected), soft_wrap=True)
        render.show(forecast.table(expected))
    if not moves.over(row):
        about = forecast.now(row)
        to.print(f"under way: {row.state}{f', {about}' if about else ''}", soft_wrap=True)
    elif row.error:
        to.print(f"{moves.outcome(row)}\n{row.hint or ''}".rstrip(), soft_wrap=True)


def _print(found: list[Event], *, wide: bool) -> None:
    from rich.console import Group

    if not found:
        render.note("nothing has happened yet")
        return
    table = render.table("time", "who", "subject", "what")
    last = {event.migration.name: event.number for event in found if event.migration}
    for event in found:
        row = event.migration
        what: RenderableType = event.text
        if row is not None and last[row.name] == event.number:
            what = Group(f"{event.text} ({row.name})", *(_phases(row) if wide else ()))
        table.add_row(_time(event.time), event.by or "–", event.subject, what)
    render.show(table)


def _phases(row: MigrationRow) -> list[str]:
    from ..show import forecast

    expected = forecast.compared(row)
    return [
        *([f"  {forecast.in_short(expected)}"] if expected else []),
        *(_phase(phase) for phase in row.phases),
    ]


def _phase(phase: Phase) -> str:
    from ..report import quantities as q

    return (
        f"  {phase.name:<12} {q.seconds(phase.seconds):>8}"
        f"  {q.size(phase.bytes) if phase.bytes is not None else '':>8}"
        f"  {'frozen' if phase.frozen else ''}".rstrip()
    )


def _time(seconds: float) -> str:
    """Write a moment in this machine's own time zone."""
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
