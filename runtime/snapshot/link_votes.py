# SPDX-License-Identifier: Apache-2.0
"""Asks hosts outside a job which of the job's hosts they reach.

They try a TCP connection where agents listen for images. So this shows a host whose cable is out.
It does not show where only the jobs' own traffic (VXLAN, UDP) is dropped.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping

from ...errors import LiveshiftError
from ..config.timeouts import Timeouts
from ..messages import HostsReached, Message, TryHosts
from ..model.jobs import Job
from .watch import MISSED

MOST_VOTERS = 3
"""Number of hosts that are asked."""


class LinkVotes:
    """``about``: the hosts to be tried. ``heard``: when each host of the cluster was last heard.
    ``complete``: whether all who were asked have answered, or had the time to."""

    def __init__(
        self, job: Job, about: Collection[str], heard: Mapping[str, float], limits: Timeouts
    ) -> None:
        self.about = frozenset(about)
        self.complete = False
        self._limits = limits
        self._voters = _voters(job, heard, limits)
        self._votes: dict[str, frozenset[str]] = {}  # by voter: the hosts that it reaches

    async def collect(
        self, request: Callable[[str, Message, float], Awaitable[Message | None]]
    ) -> None:
        """Ask all voters, each by ``request``."""
        tried = TryHosts(sorted(self.about), MISSED * self._limits.heartbeat)

        async def ask(voter: str) -> None:
            try:
                answer = await request(voter, tried, self._limits.suspicion)
            except LiveshiftError:  # it says nothing about the others then
                return
            if isinstance(answer, HostsReached):
                self._votes[voter] = self.about.intersection(answer.hosts)

        await asyncio.gather(*map(ask, self._voters))
        self.complete = True

    def count(self) -> Counter[str]:
        """The number of hosts that reach each one."""
        return Counter(host for reached in self._votes.values() for host in reached)

    def reach(self, hosts: Collection[str]) -> bool:
        """Whether any voter reaches all of these hosts."""
        return any(reached.issuperset(hosts) for reached in self._votes.values())

    def miss(self, hosts: Collection[str]) -> frozenset[str]:
        """The voters that do not reach all of these hosts."""
        return frozenset(v for v, reached in self._votes.items() if not reached.issuperset(hosts))


def _voters(job: Job, heard: Mapping[str, float], limits: Timeouts) -> list[str]:
    """Hosts outside the job that are heard: those that hold its images first, as its capsules may
    go there, then others, not the same ones for every job."""
    own, now = set(job.owners.values()), time.monotonic()
    up = [h for h, at in heard.items() if h not in own and now - at < limits.suspicion]
    held = job.newest.holders.values() if job.newest is not None else ()
    holders = {host for each in held for host in each}
    order = sorted(up, key=lambda h: (h not in holders, zlib.crc32(f"{job.name} {h}".encode()), h))
    return order[:MOST_VOTERS]
