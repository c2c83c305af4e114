# SPDX-License-Identifier: Apache-2.0
"""Counts the hours of the hosts that run protected jobs, and how often a job lost a host or
a rank, so that the orchestrator learns how often that happens here (model/failures.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable

from ...errors import LiveshiftError
from ..journal.failures_table import FailuresTable
from ..model.failures import FailuresSeen
from ..model.jobs import Job

log = logging.getLogger("liveshift.protection")

TICK_S = 30.0
WRITE_S = 600.0
"""Hours are written every WRITE_S seconds: a restart forgets fewer, and the disk has rest."""
ONE_FAULT_S = 600.0
"""Losses of one host within so many seconds count as one: all jobs that ran there have lost it, and
its ranks may die before it does."""


class FailureCount:
    """``seen``: what was seen until now. ``jobs`` gives those of the cluster, and ``is_up`` says
    whether a host is heard."""

    def __init__(
        self,
        table: FailuresTable,
        jobs: Callable[[], Iterable[Job]],
        is_up: Callable[[str], bool],
    ) -> None:
        self.seen: FailuresSeen = table.seen()
        self._table = table
        self._jobs = jobs
        self._is_up = is_up
        self._counted: dict[str, float] = {}  # by host: its last loss, in monotonic seconds
        self._looked = self._written = time.monotonic()

    def lost(self, hosts: Collection[str]) -> None:
        """Count the loss of these hosts, or of ranks on them."""
        now = time.monotonic()
        new = [h for h in hosts if now - self._counted.get(h, -ONE_FAULT_S) >= ONE_FAULT_S]
        self._counted.update(dict.fromkeys(new, now))
        if new:
            self._add(len(new), 0.0)
            self._write()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.add_time()

    def add_time(self) -> None:
        """Add the time since the last call, for each host that runs a protected job."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        hosts = {
            capsule.host
            for job in self._jobs()
            if job.state == "running" and job.newest is not None
            for capsule in job.capsules.values()
            if capsule.code is None and self._is_up(capsule.host)
        }
        if hosts:
            self._add(0, len(hosts) * since / 3600)
        if now - self._written >= WRITE_S:
            self._write()

    def _add(self, losses: int, hours: float) -> None:
        self.seen = self.seen.after(losses, hours)

    def _write(self) -> None:
        """Keep what was seen. A journal that cannot be written does no harm here: a later write has
        all of it."""
        self._written = time.monotonic()
        try:
            if self.seen != self._table.seen():
                self._table.write(self.seen)
        except LiveshiftError as error:
            log.error("how often hosts fail is not written: %s", error)
