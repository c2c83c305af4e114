# SPDX-License-Identifier: Apache-2.0
"""How jobs end: by themselves, by one failing capsule, by a signal; and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from ..errors import LiveshiftError
from . import messages
from .fleet import Fleet
from .jobs import Capsule, Job
from .link import Switchboard
from .messages import Message
from .tasks import Tasks

MOVE_LOOK_S = 0.05

KEEP_ENDED = 20
"""Ended jobs whose output stays readable; older ones are taken away."""


class Endings:
    """Follows the ends of capsules to the ends of their jobs."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard) -> None:
        self._fleet = fleet
        self._switchboard = switchboard
        self._tasks = Tasks()

    def capsule_ended(self, job: Job, capsule: Capsule, code: int) -> None:
        """Take note of a command's end (exit code, or 128 + signal). Repeatable."""
        if capsule.code is not None:
            return
        journal, rest = self._fleet.journal, [c for c in job.capsules.values() if c is not capsule]
        # The first failure is the job's, as torchrun and srun have it.
        failed = job.code if job.code is not None else code or None
        over = all(other.code is not None for other in rest)
        with journal.together():
            journal.set_ended(capsule.name, code)
            journal.tell(capsule.name, "ended", f"ended on {capsule.host} with code {code}")
            if over:
                journal.set_job(job.name, "ended", failed or 0)
                journal.tell(job.name, "ended", f"ended with code {failed or 0}")
        capsule.code, job.code = code, failed
        if over:
            job.state, job.code = "ended", failed or 0
            self._tasks.spawn(self._free_memory(job.name))
            self._tasks.spawn(self._forget_old())
        elif code != 0 and job.state == "running":
            job.state = "ending"
            self._tasks.spawn(self._end_rest(job))

    def take_up(self) -> None:
        """Go on, after a restart, with ending what one capsule's failure had begun to end."""
        for job in self._fleet.jobs.values():
            failed = next((c.code for c in job.capsules.values() if c.code), None)
            if job.state == "running" and failed:
                job.state, job.code = "ending", failed
                self._tasks.spawn(self._end_rest(job))

    async def signal(self, job: Job, signum: int) -> None:
        """Send a signal to every command of a job; SIGTERM is followed by SIGKILL after a grace."""
        await self._to_all(job, signum)
        if signum == signal.SIGTERM and job.state == "running":
            job.state = "ending"
            self._tasks.spawn(self._kill_later(job))

    def end_stray(self, host: str, capsule: str, epoch: int) -> None:
        """Kill a copy on a host that does not own the capsule (any more)."""
        limit = self._fleet.cluster.timeouts.grace
        self._tasks.spawn(self._switchboard.ask(host, messages.End(capsule, epoch), limit))

    async def forget(self, name: str, even_running: bool = False) -> None:
        """Take away what an ended job left on every host, so that its name can be used anew."""
        job = self._fleet.jobs.get(name)
        if job is None or (job.state != "ended" and not even_running):
            return
        del self._fleet.jobs[name]
        self._fleet.journal.remove_job(name)
        limit = self._fleet.cluster.timeouts.prepare
        for host in self._fleet.up():
            with contextlib.suppress(LiveshiftError):
                await self._switchboard.ask(host, messages.Forget(name), limit)

    async def _end_rest(self, job: Job) -> None:
        """One capsule failed: the others get a while to notice, then SIGTERM, then SIGKILL."""
        await asyncio.sleep(self._fleet.cluster.timeouts.grace)
        await self._to_all(job, signal.SIGTERM)
        await self._kill_later(job)

    async def _kill_later(self, job: Job) -> None:
        await asyncio.sleep(self._fleet.cluster.timeouts.grace)
        await self._to_all(job, signal.SIGKILL)

    async def _to_all(self, job: Job, signum: int) -> None:
        await asyncio.gather(*(self._to_one(c, signum) for c in job.capsules.values()))

    async def _to_one(self, capsule: Capsule, signum: int) -> None:
        """A signal sent in the middle of a move would reach the copy that is about to go."""
        while capsule.migration:
            await asyncio.sleep(MOVE_LOOK_S)
        if capsule.code is not None:
            return
        message: Message = messages.Signal(capsule.name, signum)
        if signum == signal.SIGKILL:
            message = messages.End(capsule.name, capsule.epoch)
        with contextlib.suppress(LiveshiftError):
            limit = self._fleet.cluster.timeouts.grace
            await self._switchboard.ask(capsule.host, message, limit)

    async def _free_memory(self, name: str) -> None:
        """Hosts that its capsules have left may have kept some (earlier_copies.py). One that is not
        reached now lets go of it when the job is forgotten."""
        if self._fleet.cluster.precopy.keep is not None:
            limit, word = self._fleet.cluster.timeouts.grace, messages.JobEnded(name)
            asks = [self._switchboard.ask(host, word, limit) for host in self._fleet.up()]
            await asyncio.gather(*asks, return_exceptions=True)

    async def _forget_old(self) -> None:
        ended = [name for name, job in self._fleet.jobs.items() if job.state == "ended"]
        for name in ended[:-KEEP_ENDED]:
            await self.forget(name)
