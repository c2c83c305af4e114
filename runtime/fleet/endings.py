# SPDX-License-Identifier: Apache-2.0
"""Records how jobs end by themselves or by one failing capsule, and removes what they leave.

:mod:`.stopping` ends the jobs that a person stops, and the capsules that a failure leaves running.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...errors import LiveshiftError, Refused
from .. import messages
from ..control.link import Switchboard
from ..daemon.tasks import Tasks
from ..model.jobs import Capsule, Job
from ..model.steps import MigrationStep
from ..snapshot.protection_notes import offer
from .fleet import Fleet
from .stopping import Stopping


class Endings:
    """The orchestrator has one instance, which records the ends of commands and of jobs, and
    forgets jobs. ``capsule_ended`` raises JournalError if it cannot record the end; then nothing
    has changed."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard, stopping: Stopping) -> None:
        self._fleet = fleet
        self._switchboard = switchboard
        self._stopping = stopping
        self._tasks = Tasks()

    def capsule_ended(self, job: Job, capsule: Capsule, code: int) -> None:
        """Record the end of a capsule's command (exit code, or 128 + signal). Repeatable."""
        if capsule.code is not None:
            return
        journal, rest = self._fleet.journal, [c for c in job.capsules.values() if c is not capsule]
        # The first failing capsule's code is the job's code, as torchrun and srun do it.
        failed = job.code if job.code is not None else code or None
        over = all(other.code is not None for other in rest)
        fails = not over and code != 0 and job.state in ("running", "rewinding")
        with journal.together():
            journal.set_ended(capsule.name, code)
            journal.add_event(capsule.name, "ended", f"ended on {capsule.host} with code {code}")
            if over:
                journal.set_job(job.name, "ended", failed or 0)
                saved = journal.snapshots.saved(job.name) if failed and not job.end_asked else None
                text = f"ended with code {failed or 0}{offer(saved, job.name)}"
                journal.add_event(job.name, "ended", text)
            elif fails:
                journal.set_job(job.name, "ending", failed)
        capsule.code, job.code = code, failed
        migration = self._fleet.migrations.get(capsule.migration or "")
        if migration is not None and migration.step is not MigrationStep.FREEZING:
            # While it freezes the capsule, its source says why it ended.
            with contextlib.suppress(Refused):  # the migration is over, or too far to cancel
                migration.cancel("the end of its command")  # nothing is left to move
        if over:
            job.state, job.code = "ended", failed or 0
            job.ended = 1 + max(each.ended for each in self._fleet.jobs.values())
            self._tasks.spawn(self._forget_old())
        elif fails:
            job.state = "ending"
            self._stopping.end_rest(job)

    def end_stray(self, host: str, capsule: str, epoch: int) -> None:
        """Kill a copy on a host that does not own the capsule (any more)."""
        limit = self._fleet.cluster.timeouts.grace
        self._tasks.spawn(self._switchboard.request(host, messages.End(capsule, epoch), limit))

    async def forget(self, name: str, even_running: bool = False) -> None:
        """Make all hosts remove what an ended job has left there, then free its name and subnet.

        A host that still removes the old job would take devices away from a new job in that subnet.
        So the orchestrator reuses name and subnet only after all hosts that are up have answered.
        """
        job = self._fleet.jobs.get(name)
        if job is None or (job.state != "ended" and not even_running):
            return
        async with job.forgetting:
            if self._fleet.jobs.get(name) is not job:
                return  # another call forgot the job while this one waited
            await self.forget_on_hosts(name)
            self._fleet.journal.remove_job(name)
            del self._fleet.jobs[name]

    async def forget_on_hosts(self, name: str) -> None:
        """Make all hosts that are up remove what a job that has ended has left there."""
        limit, forget = self._fleet.cluster.timeouts.prepare, messages.Forget(name)
        requests = [self._switchboard.request(host, forget, limit) for host in self._fleet.up()]
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(answer, Exception) and not isinstance(answer, LiveshiftError):
                raise answer

    async def _forget_old(self) -> None:
        """Forget the jobs that ended first. One that has trained for days has started before most
        others, and is the last to forget when it ends."""
        ended = [job for job in self._fleet.jobs.values() if job.state == "ended"]
        in_order = [job.name for job in sorted(ended, key=lambda job: job.ended)]
        for name in in_order[: -self._fleet.cluster.jobs.keep_ended]:
            await self.forget(name)
