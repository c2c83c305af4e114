# SPDX-License-Identifier: Apache-2.0
"""``liveshift stop``: end a job."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import typer

from . import render
from .context import find
from .options import Connect, Job, Key, Lab, Socket

LOOK_S = 0.2


def stop(
    job: Job,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it has ended, or at once.")
    ] = True,
    socket: Socket = None,
    lab: Lab = None,
    connect: Connect = None,
    key: Key = None,
) -> None:
    """End a job: SIGTERM to its commands, and a kill for what is left after the grace time."""
    from ..runtime.messages import GetStatus, SignalJob, Status
    from .client import Client

    with Client(find(socket, lab, connect, key)) as client:
        client.ask(SignalJob(job, signal.SIGTERM))
        while wait:
            rows = client.get(Status, GetStatus()).jobs
            row = next((row for row in rows if row.name == job), None)
            if row is None or row.state == "ended":
                code = "" if row is None else f" with code {row.code}"
                render.out().print(f"{job} has ended{code}", soft_wrap=True)
                return
            time.sleep(LOOK_S)
    render.out().print(f"{job} was told to end", soft_wrap=True)
