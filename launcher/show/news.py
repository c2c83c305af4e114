# SPDX-License-Identifier: Apache-2.0
"""What a person who watches a job in the foreground is told: where it runs, and that it moved."""

from __future__ import annotations

from ...runtime.messages import Events, GetEvents, JobRow
from ..client.client import Client
from . import moves, render

ASK_S = 10.0


class News:
    """Short lines on stderr about one job."""

    def __init__(self) -> None:
        self._begun = False
        self._event = 0  # the last one seen
        self._told: set[str] = set()  # migrations whose end was told

    def tell(self, client: Client, job: JobRow) -> None:
        """Say what is new since the last call; raises what Client.ask raises."""
        if not self._begun:
            hosts = dict.fromkeys(capsule.host for capsule in job.capsules)
            capsules = render.count(len(job.capsules), "capsule")
            render.note(f"{job.name}: {capsules} on {', '.join(hosts)}", style="dim")
            self._begun = True
        for event in client.get(Events, GetEvents(job.name, self._event), ASK_S).events:
            self._event = max(self._event, event.number)
            row = event.migration
            # Several events tell of one move. What is older was an earlier job's of the same name.
            if row is None or row.name in self._told or row.asked < job.started:
                continue
            if moves.over(row):
                self._told.add(row.name)
                render.note(moves.outcome(row), style="dim")
