# SPDX-License-Identifier: Apache-2.0
"""``liveshift inspect``: shows what a job's processes hold of GPUs and of communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..show import render
from .options import AsLayout, Layout, OpenClient, job_and_capsule_names, with_client

if TYPE_CHECKING:
    from ...runtime.messages import Inspection
    from ..client.client import Client

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
    with open_client() as client:
        found = [_inspect(client, capsule) for capsule in _capsules(client, name)]
    if output is Layout.JSON:
        render.print_json({"capsules": [render.plain(capsule) for capsule in found]})
        return
    from ..show.inspect_tables import parts

    render.show(*parts(found, wide=output is Layout.WIDE))


def _inspect(client: Client, capsule: str) -> Inspection:
    from ...runtime.messages import GetInspection, Inspection

    return client.get(Inspection, GetInspection(capsule))


def _capsules(client: Client, name: str) -> list[str]:
    """Return the capsules that are meant; raises NotFound for an unknown job."""
    from ...errors import no_such
    from ...runtime.messages import GetStatus, Status

    if "/" in name:
        return [name]
    jobs = client.get(Status, GetStatus()).jobs
    for job in jobs:
        if job.name == name:
            return [capsule.name for capsule in job.capsules if capsule.state != "ended"]
    raise no_such(f'no job "{name}"', name, (job.name for job in jobs), "there are")
