# SPDX-License-Identifier: Apache-2.0
"""Asks the other hosts of a job whether they reach one that the orchestrator does not hear.

A job that is paused cannot show that it trains. But if no other host of it reaches the silent one,
it will not train on with that host, whether the host lives or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from ...errors import LiveshiftError
from ..config.timeouts import Timeouts
from ..daemon.tasks import Tasks
from ..messages import HostsReached, Message, TryHosts
from ..model.jobs import Job
from .link_votes import MOST_VOTERS
from .watch import MISSED, HostContact


class PeerVotes:
    """``request`` sends a request to a host's agent. ``wake`` is called when something new is
    known."""

    def __init__(
        self,
        limits: Timeouts,
        request: Callable[[str, Message, float], Awaitable[Message | None]],
        wake: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._request = request
        self._wake = wake
        self._tasks = Tasks()
        self._asking: set[tuple[str, str]] = set()  # job and silent host
        # By job and silent host: when it was last heard, and whether any of its peers reaches it.
        self._reached: dict[tuple[str, str], tuple[float, bool]] = {}

    def ask_about(self, job: Job, late: Collection[str], seen: Mapping[str, HostContact]) -> None:
        """Begin to ask peers about the hosts that are ``late``. The caller does so several times
        per heartbeat."""
        own = {c.host for c in job.capsules.values() if c.code is None}
        peers = sorted((own & seen.keys()) - set(late))[:MOST_VOTERS]
        for host in late:
            if peers and host in seen and (job.name, host) not in self._asking:
                self._asking.add((job.name, host))
                self._tasks.spawn(self._ask(job.name, host, seen[host].heard, peers))

    async def _ask(self, job: str, host: str, heard: float, peers: Collection[str]) -> None:
        limit = self._limits.suspicion - MISSED * self._limits.heartbeat  # known when that is over
        try:
            votes = await asyncio.gather(*(self._vote(peer, host, limit) for peer in peers))
            said = [vote for vote in votes if vote is not None]
            if said:
                self._reached[job, host] = heard, any(said)
                self._wake()
            await asyncio.sleep(self._limits.heartbeat)
        finally:
            self._asking.discard((job, host))

    async def _vote(self, peer: str, host: str, limit: float) -> bool | None:
        """Whether the peer reaches the host; None if it does not say."""
        try:
            answer = await self._request(peer, TryHosts([host], limit), self._limits.suspicion)
        except LiveshiftError:
            return None
        return host in answer.hosts if isinstance(answer, HostsReached) else None

    def forget_all_but(self, jobs: Iterable[str]) -> None:
        """Drop what is kept of other jobs: a later one may have the same name."""
        kept = set(jobs)
        self._reached = {key: said for key, said in self._reached.items() if key[0] in kept}

    def unreached(self, job: Job, seen: Mapping[str, HostContact]) -> set[str]:
        """The hosts of a job that no peer reaches which has said so since they fell silent."""
        return {
            host
            for (name, host), (heard, reached) in self._reached.items()
            if name == job.name and not reached and host in seen and seen[host].heard == heard
        }
