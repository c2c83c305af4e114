# SPDX-License-Identifier: Apache-2.0
"""Keeps what is known of lost hosts: heartbeats, attempts to reach a kernel, and what hosts have
reported to lack. watch.py judges by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from ..config.cluster import Cluster
from ..control import reach
from ..daemon.tasks import Tasks
from ..messages import CapsuleState
from ..model.jobs import Capsule, Job
from .watch import MISSED, HostSeen, lost_hosts, suspected


class Lookout:
    """``heard``: for each host of the cluster, when its agent was last heard, in monotonic seconds;
    0 for never. ``paused``: whether the ranks of a job are held at their gates. ``opened``: when
    all hosts of a job last said that they are not. ``wake`` is called when something new is known.
    """

    def __init__(
        self,
        cluster: Cluster,
        heard: Callable[[], dict[str, float]],
        paused: Callable[[Job], bool],
        opened: Callable[[Job], float],
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.timeouts
        self._heard = heard
        self._is_paused = paused
        self._opened = opened
        self._wake = wake
        self._began = time.monotonic()
        self._answers: dict[str, tuple[float, bool]] = {}  # by host: when it was tried, the result
        self._probing: set[str] = set()
        self._progress: dict[str, float] = {}  # by capsule; see watch.lost_hosts
        self._paused: dict[str, float] = {}  # by job: when it was last seen paused
        self._missing: dict[str, tuple[int, str]] = {}  # by capsule: the epoch it lacks, and why
        self._tasks = Tasks()

    # ---- what is reported ----------------------------------------------------------------------

    def note_heartbeat(self, capsule: Capsule, seen: CapsuleState) -> None:
        """Take the owner's report on a capsule, before ``capsule.seen`` becomes it."""
        if capsule.seen is not None and seen.collectives > capsule.seen.collectives:
            self._progress[capsule.name] = time.monotonic()

    def lacks(self, capsule: Capsule, why: str) -> None:
        """A host does not have a capsule that it was let run, under the present epoch."""
        self._missing[capsule.name] = capsule.epoch, why
        self._wake()

    def begin_anew(self, capsule: Capsule) -> None:
        """Forget how far a capsule had come: it goes back to a snapshot."""
        self._progress.pop(capsule.name, None)

    def look(self, jobs: Iterable[Job]) -> None:
        """Look which of the jobs are paused, and begin to try the kernels of suspected hosts. The
        caller does so several times per heartbeat."""
        now, seen, hosts = time.monotonic(), self._seen(), set[str]()
        for job in jobs:
            if self._is_paused(job):
                self._paused[job.name] = now
            hosts.update(suspected(job, seen, now, self._limits))
        for host in (hosts & seen.keys()) - self._probing:
            self._probing.add(host)
            self._tasks.spawn(self._probe(host))

    async def _probe(self, host: str) -> None:
        began = time.monotonic()
        limit = self._limits.suspicion - MISSED * self._limits.heartbeat  # known when that is over
        try:
            answers = await reach.answers(str(self._cluster.host(host).data), limit)
            self._answers[host] = began, answers
            self._wake()
            await asyncio.sleep(self._limits.heartbeat)  # some failures come at once
        finally:
            self._probing.discard(host)

    # ---- what follows --------------------------------------------------------------------------

    def lost(self, job: Job) -> set[str]:
        """The capsules of a job that are certainly lost, and those of lost hosts."""
        silent = self.silent(job)
        return {c.name for c in job.capsules.values() if c.host in silent} | self.lacking(job)

    def lacking(self, job: Job) -> set[str]:
        """The capsules that are certainly lost: their hosts have reported without them."""
        return {capsule.name for capsule in self._lacking(job)}

    def _lacking(self, job: Job) -> list[Capsule]:
        """Only under its present epoch: a rewind has given a capsule a new one."""
        every = job.capsules.values()
        return [c for c in every if self._missing.get(c.name, (-1, ""))[0] == c.epoch]

    def silent(self, job: Job) -> list[str]:
        """The hosts of a job that count as lost."""
        now = time.monotonic()
        paused = self._paused.get(job.name, 0.0)
        if paused <= self._opened(job):  # a host that fell silent since can show that it trains
            paused = 0.0
        return lost_hosts(job, self._seen(), self._progress, now, self._limits, paused)

    def why(self, job: Job) -> str:
        """What of a job is lost, in words; "" if nothing is."""
        lacking = [self._missing[capsule.name][1] for capsule in self._lacking(job)]
        silent = [f"{host} is silent, and so is its kernel" for host in self.silent(job)]
        return "; ".join(dict.fromkeys([*lacking, *silent]))

    def silence(self, job: Job) -> float | None:
        """Seconds since the first of a job's lost hosts was last heard; None if none is silent."""
        seen = self._seen()
        heard = [seen[host].heard for host in self.silent(job)]
        return time.monotonic() - min(heard) if heard else None

    def suspects(self, job: Job) -> bool:
        """Whether a host of a job may be lost. One whose kernel answers only has no agent now."""
        seen = self._seen()
        late = suspected(job, seen, time.monotonic(), self._limits)
        return any(host in seen and seen[host].answers is not True for host in late)

    def _seen(self) -> dict[str, HostSeen]:
        # Agents need a moment until they report to an orchestrator that was just started.
        first = self._began + self._limits.suspicion
        seen = {}
        for host, heard in self._heard().items():
            tried, answers = self._answers.get(host, (0.0, True))
            seen[host] = HostSeen(max(heard, first), answers if tried > heard else None)
        return seen
