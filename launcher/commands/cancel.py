# SPDX-License-Identifier: Apache-2.0
"""``liveshift cancel``: ends a migration that is under way. Its capsule stays where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import LiveshiftError
from ..show import render
from .options import OpenClient, with_client

EXAMPLES = """\
[bold]Example[/]

liveshift cancel m3   [dim]# `liveshift status` shows which moves are under way[/]
"""


@with_client
def cancel(
    open_client: OpenClient,
    move: Annotated[str, typer.Argument(metavar="MOVE", help="Its name: m3, say.")],
) -> None:
    """Cancel a move: the capsule goes on where it is, as if the move had never begun.

    Exit code 5 once the move is committed: then it ends as it would. A cancelled move off a
    tainted host is not tried again until the host is tainted or drained once more.
    """
    from ...runtime.messages import Cancel
    from ...runtime.model.steps import MigrationStep
    from ..show import moves

    with open_client() as client:
        client.request(Cancel(move))
        row = moves.follow(client, move)
    if row.state != MigrationStep.FAILED.value:
        raise LiveshiftError(
            f"{move} was not cancelled: {moves.outcome(row)}",
            hint=f"its source had fallen silent; `liveshift events {move}` says more",
        )
    render.out().print(f"{move} is cancelled: {row.capsule} stays on {row.source}", soft_wrap=True)
