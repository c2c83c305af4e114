# SPDX-License-Identifier: Apache-2.0
"""Notices that hosts of a job do not reach each other, though the orchestrator hears them all, and
chooses which of them the job leaves.

Each agent reports the peers of its capsules that answer neither a connection nor an echo
(agent/host/peer_links.py). Peers are silent, too, while a move or a snapshot has locked their
network. So such a time does not count, nor does one in which the job trains all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from ...errors import LiveshiftError
from ..config.timeouts import Timeouts
from ..daemon.tasks import Tasks
from ..messages import HostsReached, Message, TryHosts
from ..model.jobs import Capsule, Job
from .watch import MISSED

ASKED = 3
"""So many other hosts are asked which of the hosts they reach."""
AVOIDED_S = 600.0
"""A host that a job has left because of its links comes last for so many seconds where capsules are
to go or images to be held: nothing says when its links are mended."""

Pair = tuple[str, str]
"""Two hosts, in the order of their names."""


@dataclass(frozen=True)
class Silence:
    """A capsule gets no answer from a peer on another host, for so many seconds."""

    capsule: Capsule
    peer: Capsule
    seconds: float

    @property
    def pair(self) -> Pair:
        one, other = sorted((self.capsule.host, self.peer.host))
        return one, other


def silences(job: Job) -> list[Silence]:
    """What the hosts of a job have last reported. Only of copies that they have now."""
    living = [c for c in job.capsules.values() if c.code is None and c.started and c.granted]
    peers = {job.overlay.address(c.index): c for c in living}
    return [
        Silence(capsule, peer, seconds)
        for capsule in living
        if capsule.seen is not None and capsule.seen.epoch == capsule.epoch
        for address, seconds in capsule.seen.unanswered.items()
        if (peer := peers.get(address)) is not None and peer.host != capsule.host
    ]


def hosts_to_leave(
    pairs: Collection[Pair], reached: Mapping[str, int], capsules: Mapping[str, int]
) -> list[str]:
    """Choose hosts so that no pair is left among the others: first those in the most pairs, then
    those that the fewest other hosts reach (``reached``), then those with the fewest capsules."""
    left, chosen = list(pairs), list[str]()
    while left:
        count = Counter(host for pair in left for host in pair)
        worst = max(count, key=lambda h: (count[h], -reached.get(h, 0), -capsules.get(h, 0), h))
        chosen.append(worst)
        left = [pair for pair in left if worst not in pair]
    return chosen


class LeftHosts:
    """The hosts that jobs have lately left because of their links."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # by host: when

    def note(self, hosts: Collection[str]) -> None:
        self._left |= dict.fromkeys(hosts, time.monotonic())

    def recent(self) -> set[str]:
        now = time.monotonic()
        return {host for host, when in self._left.items() if now - when < AVOIDED_S}


class CutLinks:
    """``heard``: as in Lookout. ``request`` sends a request to a host's agent. ``wake`` is called
    when something new is known."""

    def __init__(
        self,
        limits: Timeouts,
        heard: Callable[[], dict[str, float]],
        request: Callable[[str, Message, float], Awaitable[Message | None]],
        wake: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._heard = heard
        self._request = request
        self._wake = wake
        self._began = time.monotonic()
        self._held: dict[str, float] = {}  # by job: when its network was last seen locked, perhaps
        self._reached: dict[str, Counter[str]] = {}  # by job: how many hosts reach each of these
        self._faults: dict[str, tuple[float, str]] = {}  # by job: when links were last cut, which
        self._tasks = Tasks()

    def look(self, job: Job, *, paused: bool) -> None:
        """Follow a protected job. The caller does so several times per heartbeat."""
        now = time.monotonic()
        if paused or job.state != "running":
            self._held[job.name] = now
        young = self._pairs(job, MISSED * self._limits.heartbeat, {})
        if not young:
            self._reached.pop(job.name, None)
            return
        self._faults[job.name] = now, _text(young, "did")
        if job.name not in self._reached:
            self._reached[job.name] = Counter()
            self._tasks.spawn(self._ask_others(job, {host for pair in young for host in pair}))

    def leaves(self, job: Job, progress: Mapping[str, float]) -> dict[str, str]:
        """The hosts that the job must leave, and why, as text. ``progress``: as in lost_hosts."""
        cut = self._pairs(job, self._limits.suspicion, progress)
        count = Counter(capsule.host for capsule in job.capsules.values())
        chosen = hosts_to_leave(cut, self._reached.get(job.name, {}), count)
        return {host: _text({p: s for p, s in cut.items() if host in p}) for host in chosen}

    def suspects(self, job: Job) -> bool:
        """Whether hosts of a job may not reach each other."""
        return bool(self._pairs(job, 0.0, {}))

    def fault_before(self, job: Job) -> str:
        """Which hosts of a job did not reach each other within the last ``timeouts.fault`` seconds,
        as text; "" if there are none."""
        when, text = self._faults.get(job.name, (float("-inf"), ""))
        ago = time.monotonic() - when
        return f"{text} until {ago:.1f} s before" if ago < self._limits.fault else ""

    def _pairs(self, job: Job, least: float, progress: Mapping[str, float]) -> dict[Pair, float]:
        """The pairs of hosts of a job that have not reached each other for ``least`` seconds or
        more, and for how long."""
        now, limits = time.monotonic(), self._limits
        if now - self._held.get(job.name, self._began) < limits.suspicion:
            return {}
        recent = now - (limits.suspicion - limits.heartbeat)
        if any(when > recent for name, when in progress.items() if name in job.capsules):
            return {}
        heard, found = self._heard(), dict[Pair, float]()
        for each in silences(job):
            late = max(now - heard.get(host, 0.0) for host in each.pair)
            if each.seconds >= least and late <= MISSED * limits.heartbeat:
                found[each.pair] = max(each.seconds, found.get(each.pair, 0.0))
        return found

    async def _ask_others(self, job: Job, hosts: set[str]) -> None:
        """Ask hosts outside the job, its holders first, which of these hosts they reach."""
        own, heard, now = set(job.owners.values()), self._heard(), time.monotonic()
        up = [h for h, at in heard.items() if h not in own and now - at < self._limits.suspicion]
        held = job.newest.holders.values() if job.newest is not None else ()
        holders = {host for each in held for host in each}
        asked = sorted(up, key=lambda host: (host not in holders, host))[:ASKED]
        limit = self._limits.suspicion / 2
        tried = TryHosts(sorted(hosts), limit)
        counts = self._reached[job.name]

        async def ask(host: str) -> None:
            try:
                answer = await self._request(host, tried, self._limits.suspicion)
            except LiveshiftError:  # it says nothing about the others then
                return
            assert isinstance(answer, HostsReached)
            counts.update(set(answer.hosts) & hosts)

        await asyncio.gather(*map(ask, asked))
        self._wake()


def _text(pairs: Mapping[Pair, float], do: str = "do") -> str:
    each = (f"{one} and {other} {do} not reach each other" for one, other in sorted(pairs))
    return "; ".join(each)
