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
    """One ballot about the hosts of a job. ``heard``: when each host of the cluster was last heard.
    ``last``: hosts that are asked only if there are too few others. ``asked``: when it began, in
    monotonic seconds."""

    def __init__(
        self, job: Job, heard: Mapping[str, float], last: Collection[str], limits: Timeouts
    ) -> None:
        self.about = frozenset(job.owners.values())
        self.asked = time.monotonic()
        self._limits = limits
        self._voters = _voters(job, heard, last, limits)
        self._votes: dict[str, frozenset[str]] = {}  # by voter: the hosts that it reaches

    async def collect(
        self, request: Callable[[str, Message, float], Awaitable[Message | None]]
    ) -> None:
        """Ask all voters, each by ``request``, until they have answered or had the time to."""
        tried = TryHosts(sorted(self.about), MISSED * self._limits.heartbeat)

        async def ask(voter: str) -> None:
            try:
                answer = await request(voter, tried, self._limits.suspicion)
            except LiveshiftError:  # it says nothing about the others then
                return
            if isinstance(answer, HostsReached):
                self._votes[voter] = self.about.intersection(answer.hosts)

        await asyncio.gather(*map(ask, self._voters))

    def count(self) -> Counter[str]:
        """The number of hosts that reach each one."""
        return Counter(host for reached in self._votes.values() for host in reached)

    def reach(self, hosts: Collection[str]) -> frozenset[str]:
        """The voters that reach all of these hosts."""
        return frozenset(v for v, reached in self._votes.items() if reached.issuperset(hosts))

    def miss(self, hosts: Collection[str]) -> frozenset[str]:
        """The voters that do not reach all of these hosts."""
        return frozenset(v for v, reached in self._votes.items() if not reached.issuperset(hosts))


def _voters(
    job: Job, heard: Mapping[str, float], last: Collection[str], limits: Timeouts
) -> list[str]:
    """Hosts outside the job that are heard: those that hold its images first, as its capsules may
    go there, then others, not the same ones for every job."""
    own, now = set(job.owners.values()), time.monotonic()
    up = [h for h, at in heard.items() if h not in own and now - at < limits.suspicion]
    held = job.newest.holders.values() if job.newest is not None else ()
    holders = {host for each in held for host in each}

    def order(host: str) -> tuple[bool, bool, int, str]:
        return host in last, host not in holders, zlib.crc32(f"{job.name} {host}".encode()), host

    return sorted(up, key=order)[:MOST_VOTERS]
