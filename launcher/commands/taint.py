# SPDX-License-Identifier: Apache-2.0
"""``liveshift cordon``, ``taint`` and their opposites: set whether work may be on a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..show import deadline, render
from .options import AsTableOrJson, Host, HostWords, OpenClient, TableOrJson, duration, with_client

if TYPE_CHECKING:
    from ...runtime.messages import HostRow
    from ..client.client import Client

EXAMPLES = """\
[bold]Examples[/]

liveshift taint host h1 --reason "ECC errors rising"

liveshift taint host h1 --reason "spot notice" --within 30s
"""


@with_client
def taint(
    open_client: OpenClient,
    words: HostWords,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; shown wherever it matters.")
    ] = "by hand",
    within: deadline.Within = "0s",
    severity: deadline.AsSeverity = None,
    output: AsTableOrJson = TableOrJson.TABLE,
) -> int:
    """Move everything off a host and let nothing come to it, without waiting.

    With --within the exit code is 124 if some capsule may not be gone in time; it moves all the
    same.

    `liveshift untaint` takes the taint back; `liveshift drain` also waits; `liveshift cordon` lets
    what runs there stay.
    """
    from ...runtime.messages import SetTaint

    host = named(words)
    with open_client() as client:
        row = _row(client, host)
        plan = deadline.set_taint(client, SetTaint(host, reason, duration(within), severity or ""))
    leaving = row.capsules if row else []
    code = deadline.TIMED_OUT if plan is not None and deadline.late(plan) else 0
    if output is TableOrJson.JSON:
        found = {"host": host, "taint": reason, "capsules": leaving}
        render.print_json(found | {"deadline": render.plain(plan)})
        return code
    will = f"{', '.join(leaving)} will move to a spare" if leaving else "nothing runs there"
    render.out().print(f"{host} is tainted: {will}", soft_wrap=True)
    if plan is not None:
        for line in deadline.lines(plan):
            render.out().print(line, soft_wrap=True)
    return code


@with_client
def untaint(open_client: OpenClient, words: HostWords) -> None:
    """Take a host's taint back; moves under way end as they would.

    A host without a taint is left as it is. A cordon stays: `liveshift uncordon` ends both.
    """
    from ...runtime.messages import Untaint

    host = named(words)
    with open_client() as client:
        row = _row(client, host)
        client.request(Untaint(host))
    if row and row.cordon is not None:
        now = f"it stays cordoned: `liveshift uncordon {host}` ends that"
    else:
        now = "it takes work"
    was = "untainted" if row and row.taint is not None else "not tainted"
    render.out().print(f"{host} is {was}: {now}", soft_wrap=True)


@with_client
def cordon(open_client: OpenClient, host: Host) -> None:
    """Let no new work come to a host; what runs there stays.

    Neither new jobs nor moves choose it. `liveshift uncordon` takes that back; `liveshift drain`
    also moves away what runs there.
    """
    from ...runtime.messages import Cordon

    with open_client() as client:
        row = _row(client, host)
        client.request(Cordon(host))
    staying = row.capsules if row else []
    stay = f"; {', '.join(staying)} may stay" if staying else ""
    render.out().print(f"{host} is cordoned: no new work comes to it{stay}", soft_wrap=True)


@with_client
def uncordon(open_client: OpenClient, host: Host) -> None:
    """Let work come to a host again: ends a cordon, and the taint that a drain leaves."""
    from ...runtime.messages import Uncordon

    with open_client() as client:
        row = _row(client, host)
        client.request(Uncordon(host))
    marks = () if row is None else (("uncordoned", row.cordon), ("untainted", row.taint))
    was = [word for word, mark in marks if mark is not None]
    words = " and ".join(was) or "neither cordoned nor tainted"
    render.out().print(f"{host} is {words}: it takes work", soft_wrap=True)


def _row(client: Client, host: str) -> HostRow | None:
    from ...runtime.messages import GetStatus, Status

    rows = client.get(Status, GetStatus()).hosts
    return next((row for row in rows if row.name == host), None)


def named(words: list[str]) -> str:
    """Return the host in ``host NAME`` or ``NAME``; raises BadParameter for all else."""
    if len(words) == 2 and words[0] == "host":
        return words[1]
    if len(words) == 1:
        return words[0]
    raise typer.BadParameter(f'"{" ".join(words)}" is not one host; write `host NAME` or `NAME`')
