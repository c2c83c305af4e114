# SPDX-License-Identifier: Apache-2.0
"""``liveshift migrate``: moves one capsule by hand, to another host or to another GPU of its own,
or shows what such a move would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError, WrongUsage
from ...runtime.config.choices import Way
from ..show import deadline, render
from .options import (
    AsTableOrJson,
    Capsule,
    OpenClient,
    TableOrJson,
    duration,
    host_names,
    with_client,
)

if TYPE_CHECKING:
    from ...runtime.messages import Migrate, Planned
    from ..client.client import Client

PLAN_S = 300.0  # seconds for survey and preflight of a big capsule

EXAMPLES = """\
[bold]Examples[/]

liveshift migrate gpt/1   [dim]# to the best spare[/]

liveshift migrate gpt/1 --to h2 --dry-run   [dim]# only the plan[/]

liveshift migrate gpt/3 --to-gpu h1/5   [dim]# off a bad GPU, onto another one of h1, where it is[/]
"""


@with_client
def migrate(
    open_client: OpenClient,
    capsule: Capsule,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="HOST",
            help="Destination; the best spare without it.",
            autocompletion=host_names,
            show_default=False,
        ),
    ] = "",
    to_gpu: Annotated[
        str,
        typer.Option(
            "--to-gpu",
            metavar="[HOST/]GPU",
            help="A GPU of its host or of another one: an index, or the beginning of a UUID.",
            show_default=False,
        ),
    ] = "",
    from_gpu: Annotated[
        str,
        typer.Option(
            "--from-gpu",
            metavar="[HOST/]GPU",
            help="With --to-gpu: which GPU to leave, if the capsule uses several.",
            show_default=False,
        ),
    ] = "",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare every byte of device memory, not samples of it."),
    ] = False,
    way: Annotated[
        Way | None,
        typer.Option(
            "--way",
            help="How memory goes, instead of the cluster file's precopy.way.",
            show_default=False,
        ),
    ] = None,
    within: deadline.Within = "0s",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print plan, preflight and predicted pause; do nothing."),
    ] = False,
    no_cost: Annotated[
        bool,
        typer.Option(
            "--no-cost", help="Do not wait 2 to 4 s to see how much training time the move cost."
        ),
    ] = False,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; shown wherever it matters.")
    ] = "by hand",
    output: AsTableOrJson = TableOrJson.TABLE,
) -> int:
    """Move one capsule to another host or GPU while it runs, and show where the time went.

    The last line, on stderr, says what the move cost the job, measured from the job's own steps.

    Exit code 5 when the move is refused, with nothing changed. A move that fails on the way
    leaves the capsule running where it was. Exit code 124 when it was not gone --within its time.
    """
    from ...runtime.messages import Migrate

    if to and to_gpu:
        raise typer.BadParameter("--to-gpu says which host: give one of --to and --to-gpu")
    if from_gpu and not to_gpu:
        raise typer.BadParameter("--from-gpu goes with --to-gpu")
    seconds = duration(within)
    if way is not None and seconds:
        raise WrongUsage("--way and --within exclude each other", hint="leave one of them out")
    chosen = "" if way is None else way.value
    request = Migrate(capsule, to, reason, dry_run, to_gpu, from_gpu, verify, chosen, seconds)
    with open_client() as client:
        if dry_run:
            return _plan(client, request, output)
        return _move(client, request, output, not no_cost)


def _plan(client: Client, request: Migrate, output: TableOrJson) -> int:
    from ...runtime.messages import Planned

    plan = client.get(Planned, request, PLAN_S)
    if output is TableOrJson.JSON:
        render.print_json(plan)
    else:
        _print_plan(plan)
    late = plan.prediction is not None and plan.prediction.needs_s is not None
    return deadline.TIMED_OUT if late else 0


def _print_plan(plan: Planned) -> None:
    from ..report import quantities as q
    from ..show import forecast

    to = render.out()
    to.print(f"{plan.capsule}: {plan.source} → {plan.destination} (nothing is done)", style="bold")
    table = render.table("what", "found")
    for what, found in plan.checks:
        table.add_row(what, found)
    if plan.image_bytes:  # a swap of GPUs has no image
        table.add_row("image", f"about {q.size(plan.image_bytes)}")
        table.add_row("carried files", q.size(plan.carried_bytes))
    render.show(table)
    if plan.prediction is not None:
        expected = forecast.planned(plan.prediction)
        to.print()
        to.print(forecast.in_short(expected), style="bold", soft_wrap=True)
        for line in forecast.cost_lines(plan.prediction):
            to.print(line, soft_wrap=True)
        render.show(forecast.table(expected))


def _move(client: Client, request: Migrate, output: TableOrJson, costs: bool) -> int:
    from ...runtime.messages import Named
    from ..show import moves

    name = client.get(Named, request, PLAN_S).name
    try:
        row = moves.follow(client, name)
    except KeyboardInterrupt:
        render.note(
            f"{name} goes on: `liveshift events {name}` shows how;"
            f" `liveshift cancel {name}` ends it"
        )
        raise
    except LiveshiftError as error:
        error.hint = error.hint or f"the move goes on: `liveshift events {name}`"
        raise
    as_json = output is TableOrJson.JSON
    if not (as_json or row.error):
        render.out(markup=True).print(moves.phase_table(row))
        render.out().print(moves.sum_up(row), soft_wrap=True)
    try:
        if costs and row.kind == "move" and not row.error:
            (row,) = moves.with_costs(client, [row])
            if not as_json:
                render.note(moves.cost(row))
    finally:
        if as_json:
            render.print_json(row)
    moves.raise_if_failed(row)
    if not request.within or row.seconds <= request.within:
        return 0
    render.note(
        f"{row.capsule} was gone from {row.source} after {row.seconds:.1f} s, not within"
        f" {request.within:g} s"
    )
    return deadline.TIMED_OUT
