# SPDX-License-Identifier: Apache-2.0
"""What a taint sets in motion: everything on a tainted host moves to a spare, one by one.

One move at a time for each tainted host keeps its link for one image, and a job from standing
still in two places. A capsule that could not move is tried again when something has changed
(a host came, a slot was freed, the taint was renewed) and after a while in any case.
"""

from __future__ import annotations

import asyncio
import time

from ..errors import LiveshiftError
from .fleet import Fleet
from .moves import Moves

RETRY_S = 30.0
TICK_S = 1.0


class Evacuation:
    """Watches taints and begins moves until tainted hosts are empty."""

    def __init__(self, fleet: Fleet, moves: Moves) -> None:
        self._fleet = fleet
        self._moves = moves
        self._wake = asyncio.Event()
        self._not_before: dict[str, float] = {}
        self._refused: dict[str, str] = {}

    def wake(self) -> None:
        """Something has changed: look again now."""
        self._wake.set()

    def retry(self, host: str) -> None:
        """A person asked (again) for this host: forget what failed before."""
        for job in self._fleet.jobs.values():
            for capsule in job.capsules.values():
                if capsule.host == host:
                    self._not_before.pop(capsule.name, None)
                    self._refused.pop(capsule.name, None)
        self.wake()

    async def run(self) -> None:
        while True:
            for host in list(self._fleet.taints):
                self._next(host)
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            except TimeoutError:
                continue

    def _next(self, host: str) -> None:
        if any(move.source == host for move in self._fleet.under_way()):
            return
        reason, by = self._fleet.taints[host]
        for job in self._fleet.jobs.values():
            for capsule in job.capsules.values():
                if capsule.host != host or capsule.code is not None or capsule.migration:
                    continue
                if time.monotonic() < self._not_before.get(capsule.name, 0.0):
                    continue
                try:
                    self._moves.start(job, capsule, "", f"{host} is tainted: {reason}", by)
                except LiveshiftError as error:
                    if self._refused.get(capsule.name) != str(error):  # said once
                        self._refused[capsule.name] = str(error)
                        hint = f" ({error.hint})" if error.hint else ""
                        self._fleet.journal.tell(capsule.name, "not moved", f"{error}{hint}", by)
                    continue
                self._refused.pop(capsule.name, None)
                self._not_before[capsule.name] = time.monotonic() + RETRY_S  # should it fail
                return
