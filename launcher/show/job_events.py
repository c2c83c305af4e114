# SPDX-License-Identifier: Apache-2.0
"""Reads the history of a job for a command that follows what it has ordered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import NotFound

if TYPE_CHECKING:
    from ...runtime.messages import Event
    from ..client.client import Client


def after(client: Client, job: str, number: int) -> list[Event]:
    """Return the events of a job that are later than the one with this number."""
    from ...runtime.messages import Events, GetEvents
    from . import retry

    return retry.request(client, Events, GetEvents(job, number)).events


def last(client: Client, job: str) -> int:
    """Return the number of a job's last event, 0 if there is none, or if there is no such job."""
    try:
        return max((event.number for event in after(client, job, 0)), default=0)
    except NotFound:  # the command that is followed says so, if it needs the job
        return 0
