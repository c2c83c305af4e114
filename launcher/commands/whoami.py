# SPDX-License-Identifier: Apache-2.0
"""``liveshift whoami``: shows who the cluster takes the caller for, and what that allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..show import render
from .options import AsTableOrJson, OpenClient, TableOrJson, with_client

if TYPE_CHECKING:
    from ...runtime.messages import Me


@with_client
def whoami(open_client: OpenClient, output: AsTableOrJson = TableOrJson.TABLE) -> None:
    """Show who the cluster takes you for, your role, and what it allows."""
    from ...runtime.messages import Me, WhoAmI

    with open_client() as client:
        me = client.get(Me, WhoAmI())
    if output is TableOrJson.JSON:
        render.print_json(me)
        return
    table = render.table("what", "found")
    table.show_header = False
    for what, found in _rows(me):
        table.add_row(what, found)
    render.show(table)


def _rows(me: Me) -> list[tuple[str, str]]:
    who = f"{me.name} (operator's key)" if me.uid is None else f"{me.name} (uid {me.uid})"
    rows = [("cluster", me.cluster), ("who", who)]
    if me.through:
        rows.append(("through", f"the agent on {me.through}"))
    rows.append(("role", f"{me.role} ({me.why})"))
    return rows + [("may" if n == 0 else "", text) for n, text in enumerate(me.may)]
