# SPDX-License-Identifier: Apache-2.0
"""``liveshift stop``: ends a job."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..show import render
from .options import AsTableOrJson, Job, OpenClient, TableOrJson, host_names, with_client

if TYPE_CHECKING:
    from ...runtime.messages import CapsuleRow, JobRow

LOOK_S = 0.2
QUIET_S = 1.0
"""A job that ends within this many seconds is waited for without a line."""


@with_client
def stop(
    open_client: OpenClient,
    job: Job,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it has ended, or at once.")
    ] = True,
    unknown: Annotated[
        str,
        typer.Option(
            "--unknown",
            metavar="HOST",
            help="End what that host runs of a job which the journal does not know.",
            autocompletion=host_names,
            show_default=False,
        ),
    ] = "",
    output: AsTableOrJson = TableOrJson.TABLE,
) -> None:
    """End a job: SIGTERM to its commands, and a kill for what is left after the grace time.

    Moves of the job are cancelled. A capsule whose host does not answer is ended when the host is
    back, whether this command still waits for it or not.
    """
    from ...runtime.messages import EndUnknown, GetStatus, SignalJob, Status, UnknownEnded
    from ..show import retry

    with open_client() as client:
        if unknown:
            if client.get(UnknownEnded, EndUnknown(unknown, job)).later:
                render.note(f"{unknown} is not up: what it runs of {job} is ended when it is back")
                _say(job, "ending", None, output)
            else:
                _say(job, "ended", None, output, on=unknown)
            return
        client.request(SignalJob(job, signal.SIGTERM))
        began, shown = time.monotonic(), ""
        try:
            while wait:
                status = retry.request(client, Status, GetStatus(job))
                row = next((row for row in status.jobs if row.name == job), None)
                if row is None or row.state == "ended":
                    _say(job, "ended", None if row is None else row.code, output)
                    return
                text = waits_for(row)
                if status.trouble:  # the end is known once the journal has it
                    text += f"; {status.trouble}"
                if text != shown and time.monotonic() > began + QUIET_S:
                    shown = text
                    render.note(text)
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            render.note(f"{job} is being ended all the same: `liveshift status {job}` shows it")
            raise
    _say(job, "ending", None, output)


def _say(job: str, state: str, code: int | None, output: TableOrJson, on: str = "") -> None:
    if output is TableOrJson.JSON:
        render.print_json({"job": job, "state": state, "code": code})
    elif state == "ended":
        where = f" on {on}" if on else ""
        with_code = "" if code is None else f" with code {code}"
        render.out().print(f"{job} has ended{where}{with_code}", soft_wrap=True)
    else:
        render.out().print(f"{job} is being ended", soft_wrap=True)


def waits_for(job: JobRow) -> str:
    """Return what of a job has not ended yet, and why that takes time."""
    left = [_why(capsule) for capsule in job.capsules if capsule.code is None]
    return f"waiting for {', '.join(left)}" if left else f"waiting for {job.name}"


def _why(capsule: CapsuleRow) -> str:
    if capsule.state == "unknown":
        host = capsule.host
        return f"{capsule.name} ({host} does not answer: it is ended when {host} is back)"
    if capsule.state == "moving":
        return f"{capsule.name} (its move {capsule.migration} ends first)"
    return f"{capsule.name} on {capsule.host} (it has SIGTERM, and is killed after the grace time)"
