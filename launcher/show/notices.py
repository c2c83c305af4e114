# SPDX-License-Identifier: Apache-2.0
"""Prints what a person who watches a job in the foreground must know: where it runs, its moves."""

from __future__ import annotations

from ...runtime.messages import Events, GetEvents, JobRow
from ..client.client import Client
from . import moves, render

REQUEST_S = 10.0


class JobNotices:
    """Short lines on stderr about one job."""

    def __init__(self) -> None:
        self._begun = False
        self._event = 0  # the last one seen
        self._reported: set[str] = set()  # migrations whose end was printed

    def print_new(self, client: Client, job: JobRow) -> None:
        """Print what is new since the last call. Raises what Client.request raises."""
        if not self._begun:
            hosts = dict.fromkeys(capsule.host for capsule in job.capsules)
            capsules = render.count(len(job.capsules), "capsule")
            render.note(f"{job.name}: {capsules} on {', '.join(hosts)}", style="dim")
            self._begun = True
        for event in client.get(Events, GetEvents(job.name, self._event), REQUEST_S).events:
            self._event = max(self._event, event.number)
            row = event.migration
            # Several events may be about one move. A move that was asked for before the job began
            # belongs to an earlier job of the same name.
            if row is None or row.name in self._reported or row.asked < job.started:
                continue
            if moves.over(row):
                self._reported.add(row.name)
                render.note(moves.outcome(row), style="dim")
