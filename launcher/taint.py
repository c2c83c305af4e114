# SPDX-License-Identifier: Apache-2.0
"""``liveshift taint``, ``untaint`` and ``uncordon``: whether work may be on a host."""

from __future__ import annotations

from typing import Annotated

import typer

from . import render
from .context import Place, find
from .options import Connect, Host, HostWords, Key, Lab, Socket

EXAMPLES = """\
[bold]Example[/]

liveshift taint host h1 --reason "ECC errors rising"
"""


def taint(
    words: HostWords,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; shown wherever it matters.")
    ] = "by hand",
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Move everything off a host and let nothing come to it, without waiting.

    `liveshift untaint` takes the taint back; `liveshift drain` also waits.
    """
    from ..runtime.messages import GetStatus, SetTaint, Status
    from .client import Client

    host = named(words)
    with Client(find(socket, lab, connect, key)) as client:
        rows = client.get(Status, GetStatus()).hosts
        client.ask(SetTaint(host, reason))
    leaving = next((row.capsules for row in rows if row.name == host), [])
    will = f"{', '.join(leaving)} will move to a spare" if leaving else "nothing runs there"
    render.out().print(f"{host} is tainted: {will}", soft_wrap=True)


def untaint(
    words: HostWords,
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Let work come to a host again; moves under way end as they would."""
    _untaint(named(words), find(socket, lab, connect, key))


def uncordon(
    host: Host,
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Let work come back to a drained host: the same as untaint."""
    _untaint(host, find(socket, lab, connect, key))


def _untaint(host: str, place: Place) -> None:
    from ..runtime.messages import Untaint
    from .client import Client

    with Client(place) as client:
        client.ask(Untaint(host))
    render.out().print(f"{host} takes work again", soft_wrap=True)


def named(words: list[str]) -> str:
    """The host in ``host NAME`` or ``NAME``; raises BadParameter for anything else."""
    if len(words) == 2 and words[0] == "host":
        return words[1]
    if len(words) == 1:
        return words[0]
    raise typer.BadParameter(f'"{" ".join(words)}" is not one host; write `host NAME` or `NAME`')
