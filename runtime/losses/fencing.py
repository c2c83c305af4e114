# SPDX-License-Identifier: Apache-2.0
"""Runs the cluster file's ``snapshots.fence``: a command that switches a host off, or makes sure in
another way that nothing runs there any more.

It is needed where no host of a job is heard. The job may train there, and restored elsewhere it
would train twice. After the command has ended with 0 for one of these hosts, a part of the job has
certainly ended. So that counts as if a person had called the host dead.

What is switched off is lost for every job on that host. So nothing is, unless all of this holds:

- The hosts and their kernels have been silent for ``snapshots.fence_after``.
- The job could be taken back at once: its images are there, other hosts have room, and no move may
  save it.
- Other hosts say that they do not reach any of these hosts. If one does, only the orchestrator is
  cut off from a job that may be well. If none says anything, the orchestrator may be cut off from
  everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Protocol

from ... import units
from ...errors import LiveshiftError
from ..config.cluster import Cluster
from ..daemon.bounded_command import outcome, run_bounded
from ..daemon.tasks import Tasks
from ..messages import HostsReached, Message, TryHosts
from ..model.jobs import Job
from .link_votes import MOST_VOTERS
from .watch import MISSED

log = logging.getLogger("liveshift.fencing")

LIMIT_S = 120.0
"""The command is killed after so many seconds. A management controller may need a minute."""
RETRY_S = 30.0
"""Seconds until the command is run again for a host for which it has failed."""
MOST_RETRY_S = 600.0
"""These seconds double with each failure, up to this."""
KIND = "fencing"
"""The kind of the history's entries."""


class FencingContext(Protocol):
    """What the orchestrator knows of jobs and hosts, and does for the fencing."""

    cluster: Cluster

    async def request(self, host: str, message: Message, timeout: float, /) -> Message | None:
        """Send a request to a host's agent, and return the answer. Raises LiveshiftError."""
        ...

    def unproven(self, job: Job) -> tuple[str, ...]:
        """The hosts of a job of which one must be known to be dead before the job can be taken
        back, or before its rewind can go on. Empty if there is no need for that, or if one of them
        is heard or its kernel answers."""
        ...

    def silent_since(self, host: str) -> float | None:
        """When a host was last heard, in monotonic seconds, if its kernel does not answer either;
        else None."""
        ...

    def why_not(self, job: Job, hosts: Sequence[str]) -> str:
        """Why the job could not be taken back without these hosts, as text; "" if it could."""
        ...

    async def images_missing(self, job: Job, hosts: Sequence[str]) -> str:
        """Which image is not there for that, as text; "" if all are. Raises LiveshiftError if that
        is not known."""
        ...

    def voters(self) -> list[str]:
        """The hosts that are heard and have this cluster file."""
        ...

    def others_on(self, host: str, job: Job) -> int:
        """The number of capsules of other jobs on a host."""
        ...

    def call_dead(self, job: Job, host: str, by: str) -> None:
        """Take a host of a job for dead, because ``by`` says so, until it is heard."""
        ...

    def note(self, job: Job, kind: str, text: str) -> None:
        """Add to the history of a job."""
        ...


class Fencing:
    """The command for all jobs. ``limit_s``, ``retry_s``: see LIMIT_S and RETRY_S."""

    def __init__(
        self, context: FencingContext, limit_s: float = LIMIT_S, retry_s: float = RETRY_S
    ) -> None:
        self._context = context
        self._limits = context.cluster.timeouts
        self._argv = context.cluster.snapshots.fence
        self._after_s = context.cluster.snapshots.fence_after
        self._limit_s = limit_s
        self._retry_s = retry_s
        self._jobs: set[str] = set()  # those on which a task works
        self._busy: set[str] = set()  # the hosts for which the command runs
        self._off: dict[str, float] = {}  # by host that is off: the time at which it was last heard
        self._failed: dict[str, int] = {}  # by host: how often in a row the command has failed
        self._again: dict[str, float] = {}  # by host: when the command may run again
        self._noted: dict[str, str] = {}  # by job: why nothing is done, as the history says
        self._tasks = Tasks()

    @property
    def busy(self) -> bool:
        """Whether a command runs."""
        return bool(self._busy)

    def look(self, job: Job) -> None:
        """Begin to fence a host of the job if that is needed, and return at once. The caller does
        so several times per heartbeat. Raises what ``unproven`` does."""
        if not self._argv or job.name in self._jobs:
            return
        hosts = self._context.unproven(job)
        if not hosts:
            self._noted.pop(job.name, None)
        elif self._silent_since(*hosts) <= time.monotonic() - self._after_s:
            self._jobs.add(job.name)
            self._tasks.spawn(self._work_on(job, hosts))

    def _silent_since(self, *hosts: str) -> float:
        """When the last of them was heard, in monotonic seconds; infinity if one may answer."""
        since = [self._context.silent_since(host) for host in hosts]
        return max(float("inf") if each is None else each for each in since)

    async def _work_on(self, job: Job, hosts: tuple[str, ...]) -> None:
        try:
            if off := next(filter(self._is_off, hosts), ""):  # it was fenced for another job
                self._context.call_dead(job, off, self._argv[0])
            elif host := self._choose(job, hosts):
                self._busy.add(host)
                try:
                    if await self._may_be_fenced(job, hosts):
                        await self._fence(job, host)
                        return
                finally:
                    self._busy.discard(host)
            await asyncio.sleep(self._limits.suspicion)  # then all is looked at again
        except LiveshiftError as error:
            self._note_once(job, hosts, str(error))
            await asyncio.sleep(self._limits.suspicion)
        finally:
            self._jobs.discard(job.name)

    def _is_off(self, host: str) -> bool:
        return self._off.get(host) == self._silent_since(host)

    def _choose(self, job: Job, hosts: Sequence[str]) -> str:
        """The host that is to be switched off now; "" for none. One is enough, so while the command
        runs for one of them, for another job, nothing else is done."""
        now = time.monotonic()
        idle = [host for host in hosts if self._again.get(host, 0.0) <= now]
        if not idle or not self._busy.isdisjoint(hosts):
            return ""

        def costs(host: str) -> tuple[float, int]:
            return self._again.get(host, 0.0), self._context.others_on(host, job)

        return min(idle, key=costs)

    async def _may_be_fenced(self, job: Job, hosts: tuple[str, ...]) -> bool:
        """Notes why, if not."""
        why = self._context.why_not(job, hosts)
        why = why or await self._context.images_missing(job, hosts)
        why = why or await self._votes_against(hosts)
        # Seconds have passed: a host may be heard, or a person may have stopped the job.
        if self._context.unproven(job) != hosts:
            return False
        if why := why or self._context.why_not(job, hosts):
            self._note_once(job, hosts, why)
        return not why

    async def _votes_against(self, hosts: Sequence[str]) -> str:
        """Why other hosts think that these should not be switched off; "" if they do not."""
        up = [host for host in self._context.voters() if host not in hosts]
        voters = random.sample(up, min(len(up), MOST_VOTERS))  # others the next time
        question = TryHosts(sorted(hosts), MISSED * self._limits.heartbeat)

        async def ask(voter: str) -> list[str] | None:
            try:
                answer = await self._context.request(voter, question, self._limits.suspicion)
            except LiveshiftError:  # it says nothing about the others then
                return None
            return answer.hosts if isinstance(answer, HostsReached) else None

        votes = [vote for vote in await asyncio.gather(*map(ask, voters)) if vote is not None]
        if not votes:
            return "no other host answers, so perhaps the orchestrator is cut off"
        reached = sorted({host for vote in votes for host in vote})
        return f"other hosts reach {reached[0]}, so the job may be well" if reached else ""

    async def _fence(self, job: Job, host: str) -> None:
        since, program = self._silent_since(host), self._argv[0]
        text = f"no host of {job.name} is heard: runs {program} for {host}"
        self._context.note(job, KIND, text)
        log.warning("%s: %s", job.name, text)
        variables = {
            "LIVESHIFT_HOST": host,
            "LIVESHIFT_ADDRESS": self._context.cluster.host(host).data.address,
            "LIVESHIFT_JOB": job.name,
        }
        end = await run_bounded(self._argv, variables, self._limit_s)
        text = f"{program}, for {host}, {outcome(end, self._limit_s)}"
        if end.code != 0:
            failures = self._failed[host] = self._failed.get(host, 0) + 1
            pause = min(self._retry_s * 2 ** (failures - 1), MOST_RETRY_S)
            self._again[host] = time.monotonic() + pause
        elif self._silent_since(host) == since:
            self._failed.pop(host, None)
            self._off[host] = since
            self._context.call_dead(job, host, program)
        else:
            text += f", but {host} was heard meanwhile"
        log.warning("%s: %s", job.name, text)
        self._context.note(job, KIND, text)

    def _note_once(self, job: Job, hosts: Sequence[str], why: str) -> None:
        """Note why no host is switched off, each reason once in a row."""
        if self._noted.get(job.name) != why:
            self._noted[job.name] = why
            text = f"{units.some(hosts, 8)}: not fenced, as {why}"
            log.warning("%s: %s", job.name, text)
            self._context.note(job, KIND, text)
