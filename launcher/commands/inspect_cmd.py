# SPDX-License-Identifier: Apache-2.0
"""``liveshift inspect``: shows what a job's processes hold of GPUs and of communicators."""

from __future__ import annotations

from typing import Annotated

import typer

from ..show import render
from .options import AsLayout, Layout, OpenClient, capsules_of, job_and_capsule_names, with_client

EXAMPLES = """\
[bold]Examples[/]

liveshift inspect gpt/1

liveshift inspect gpt -o json | jq '.capsules[].processes[].obstacles'
"""


@with_client
def inspect(
    open_client: OpenClient,
    name: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CAPSULE",
            help="All capsules of a job, or one.",
            autocompletion=job_and_capsule_names,
            show_default=False,
        ),
    ],
    output: AsLayout = Layout.TABLE,
) -> None:
    """Show what a job's processes hold while they run: device memory by kind, streams,
    communicators, and what of it would stand in the way of a move."""
    from ...runtime.messages import GetInspection, Inspection

    with open_client() as client:
        names = capsules_of(client, name, ended=False)
        found = [client.get(Inspection, GetInspection(capsule)) for capsule in names]
    if output is Layout.JSON:
        render.print_json({"capsules": [render.plain(capsule) for capsule in found]})
        return
    from ..show.inspect_tables import parts

    render.show(*parts(found, wide=output is Layout.WIDE))
