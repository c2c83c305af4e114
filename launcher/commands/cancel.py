# SPDX-License-Identifier: Apache-2.0
"""``liveshift cancel``: ends a migration that is under way. Its capsule stays where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import LiveshiftError
from ..client.context import find
from ..show import render
from .options import Connect, Key, Lab, Socket

EXAMPLES = """\
[bold]Example[/]

liveshift cancel m3   [dim]# `liveshift status` shows which moves are under way[/]
"""


def cancel(
    move: Annotated[str, typer.Argument(metavar="MOVE", help="Its name: m3, say.")],
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """Cancel a move: the capsule goes on where it is, as if the move had never begun.

    Exit code 5 once the move is committed: then it ends as it would. A cancelled move off a
    tainted host is not tried again until the host is tainted or drained once more.
    """
    from ...runtime.messages import Cancel
    from ...runtime.model.steps import MigrationStep
    from ..client.client import Client
    from ..show import moves

    with Client(find(socket, lab, connect, key)) as client:
        client.request(Cancel(move))
        row = moves.follow(client, move)
    if row.state != MigrationStep.FAILED.value:
        raise LiveshiftError(
            f"{move} was not cancelled: {moves.outcome(row)}",
            hint=f"its source had fallen silent; `liveshift events {move}` says more",
        )
    render.out().print(f"{move} is cancelled: {row.capsule} stays on {row.source}", soft_wrap=True)
