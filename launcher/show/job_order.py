# SPDX-License-Identifier: Apache-2.0
"""Follows what becomes of an order about a whole job, by the job's history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import LiveshiftError
from ...units import some
from . import job_events, render

if TYPE_CHECKING:
    from ..client.client import Client

LOOK_S = 0.2
MOVES_SHOWN = 3

UNDER_WAY = {"suspended": "suspending", "resumed": "resuming", "saved": "saving"}
"""For the kind of the event that says that an order was carried out, the kind of those before."""


def follow(client: Client, job: str, last: int, done: str, *, quiet: bool) -> str:
    """Wait until the job is ``done``, and print what happens meanwhile; return how it went.

    ``last``: the number of the job's last event before the order. Raises LiveshiftError if the
    order has failed.
    """
    under_way, unsaved = UNDER_WAY[done], ""
    ends = {f"not {done}"} if done == "saved" else {f"not {done}", "ended"}
    try:
        while True:
            for event in job_events.after(client, job, last):
                last = event.number
                if event.subject != job:
                    continue
                if event.kind in ends:
                    raise LiveshiftError(f"{job} was not {done}: {event.text}")
                # Another command was faster than the end of the job's copies.
                if event.kind == "resumed" and done == "suspended":
                    raise LiveshiftError(
                        f"{job} was not suspended: another command has resumed it meanwhile,"
                        f" and it {event.text}"
                    )
                if event.kind == "not saved":
                    unsaved = event.text
                if event.kind == done and unsaved:
                    raise LiveshiftError(
                        f"{job} {unsaved}", hint=f"it is suspended all the same: it {event.text}"
                    )
                if event.kind == done:
                    return event.text
                if event.kind == under_way and not quiet:
                    render.note(f"{job}: {event.text}")
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        if done != "resumed" and _withdraw(client, job):
            render.note(f"{job} is not {done}: the order is taken back")
        else:
            render.note(f"{job} is {under_way} all the same: `liveshift events {job}` shows it")
        raise


def waiting(moves: list[str]) -> str:
    """Say what an order waits for; "" if these are no moves."""
    return f" after the end of {some(moves, MOVES_SHOWN)}" if moves else ""


def _withdraw(client: Client, job: str) -> bool:
    """Take an order back that waits still; return whether it is void."""
    from ...runtime.messages import Withdrawn, WithdrawOrder

    try:
        return client.get(Withdrawn, WithdrawOrder(job)).done
    except LiveshiftError:  # then it stands, as far as is known here
        return False


def say(about: Mapping[str, object], state: str, text: str, *, as_json: bool) -> None:
    """Print what became of it. ``about``: has the job's name, and what else JSON has."""
    if as_json:
        render.print_json({**about, "state": state, "text": text})
    else:
        render.out().print(f"{about['job']} {text}", soft_wrap=True)
