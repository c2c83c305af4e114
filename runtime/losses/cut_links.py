# SPDX-License-Identifier: Apache-2.0
"""Notices that hosts of a job do not reach each other, though the orchestrator hears them all, and
chooses which of them the job leaves.

Each agent reports the peers of its capsules that answer neither a connection nor an echo
(agent/host/peer_links.py). A peer is silent, too, while a move or a snapshot has locked its
network, and once its command has ended. If its agent is stopped in the middle of a snapshot, the
network stays locked until it runs again. None of these times count, nor do those in which the job
trains all the same. link_votes.py asks other hosts which of the two they reach.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ..config.timeouts import Timeouts
from ..daemon.tasks import Tasks
from ..messages import Message
from ..model.jobs import Capsule, Job
from .left_hosts import LeftHosts, Pair
from .link_votes import LinkVotes
from .watch import MISSED

EARLY = MISSED + 1
"""Number of heartbeats of silence after which a link is suspected. A peer whose command has ended
is missing in the reports sooner."""
NAMED_PAIRS = 3
"""Number of pairs of hosts that a reason names."""


def silences(job: Job, now: float, limits: Timeouts, least: float) -> dict[Pair, float]:
    """The pairs of hosts between which a capsule gets no answer from a peer, and for how many
    seconds: ``least`` or more. Only what was reported lately counts, of capsules that are reported
    themselves, and have been without a gap for the suspicion. Nothing counts as long as any capsule
    of the job finishes collectives."""
    if not any(c.seen is not None and c.seen.unanswered for c in job.capsules.values()):
        return {}
    fresh, recent = now - MISSED * limits.heartbeat, now - (limits.suspicion - limits.heartbeat)
    if any(capsule.progressed > recent for capsule in job.capsules.values()):
        return {}
    steady = now - limits.suspicion
    reported = [c for c in job.capsules.values() if c.reported > fresh and c.steady <= steady]
    living = [capsule for capsule in reported if _lives(capsule)]
    peers = {job.overlay.address(capsule.index): capsule for capsule in living}
    found: dict[Pair, float] = {}
    for capsule in living:
        assert capsule.seen is not None
        for address, seconds in capsule.seen.unanswered.items():
            peer = peers.get(address)
            if peer is not None and peer.host != capsule.host and seconds >= least:
                one, other = sorted((capsule.host, peer.host))
                found[one, other] = max(seconds, found.get((one, other), 0.0))
    return found


def _lives(capsule: Capsule) -> bool:
    seen = capsule.seen
    known = seen is not None and seen.epoch == capsule.epoch
    return known and capsule.code is None and capsule.started and capsule.granted


def hosts_to_leave(
    pairs: Collection[Pair],
    before: Collection[Pair],
    reached: Mapping[str, int],
    capsules: Mapping[str, int],
    *,
    votes_first: bool = False,
) -> list[str]:
    """Choose hosts until no cut link is left among the others. The next one is always the one with
    the most cut links; then the one that the fewest other hosts reach (``reached``), the one with
    the most links that were cut ``before``, and the one with the fewest capsules. With
    ``votes_first`` what others reach comes before the number of links."""
    earlier = Counter(host for pair in {*before} - {*pairs} for host in pair)
    left, chosen = list(pairs), list[str]()
    while left:
        count = Counter(host for pair in left for host in pair)

        def worth(host: str, count: Counter[str] = count) -> tuple[int, int, int, int, str]:
            links, unreached = count[host], -reached.get(host, 0)
            first, second = (unreached, links) if votes_first else (links, unreached)
            return first, second, earlier[host], -capsules.get(host, 0), host

        worst = max(count, key=worth)
        chosen.append(worst)
        left = [pair for pair in left if worst not in pair]
    return chosen


@dataclass
class _Watched:
    """What is kept of a protected job. Times are in monotonic seconds."""

    held: float  # when its networks were last locked, or may have been
    young: float = float("-inf")  # when links of it were last suspected
    fault: str = ""  # which ones, as text
    votes: LinkVotes | None = None  # the newest ballot that is complete
    ballot: LinkVotes | None = None  # the one under way


@dataclass(frozen=True)
class CutVerdict:
    """Which hosts a job leaves, and why, as text. ``reach``, ``miss``: hosts outside the job that
    reach those that stay, and hosts that do not. ``seconds``: for how long links have been cut.
    ``pairs``: which ones. ``waits``: why it leaves none although links are cut, as text, or ""."""

    leaves: frozenset[str] = frozenset()
    why: str = ""
    reach: frozenset[str] = frozenset()
    miss: frozenset[str] = frozenset()
    seconds: float = 0.0
    pairs: frozenset[Pair] = frozenset()
    waits: str = ""


NOTHING = CutVerdict()


class CutLinks:
    """``heard``: as in Lookout. ``request`` sends a request to a host's agent. ``wake`` is called
    when something new is known."""

    def __init__(
        self,
        limits: Timeouts,
        heard: Callable[[], dict[str, float]],
        request: Callable[[str, Message, float], Awaitable[Message | None]],
        wake: Callable[[], None],
        left: LeftHosts,
    ) -> None:
        self._limits = limits
        self._heard = heard
        self._request = request
        self._wake = wake
        self._left = left
        self._began = time.monotonic()
        self._tasks = Tasks()
        self._watched: dict[str, _Watched] = {}  # by job
        # By job: until when a verdict holds, and of which state. A tick asks several times for it.
        self._verdicts: dict[str, tuple[float, tuple[str, int, int], CutVerdict]] = {}

    def follow(self, job: Job, *, locked: bool) -> None:
        """Follow a protected job. The caller does so several times per heartbeat. ``locked``:
        whether networks of it may be locked."""
        now, suspicion = time.monotonic(), self._limits.suspicion
        if (watched := self._watched.get(job.name)) is None:
            # Its first snapshot may just have ended, or one that an earlier orchestrator has left.
            watched = _Watched(max(now, self._began + 2 * suspicion))
            self._watched[job.name] = watched
        if locked or job.state != "running":
            watched.held = max(now, watched.held)
        self._verdicts.pop(job.name, None)
        if young := self._pairs(job, now, EARLY * self._limits.heartbeat):
            watched.young, watched.fault = now, _text(young, "did")
            old = watched.votes is None or now - watched.votes.asked > suspicion
            if old and watched.ballot is None:
                watched.ballot = LinkVotes(job, self._heard(), self._left.recent(), self._limits)
                self._tasks.spawn(self._vote(job.name, watched, watched.ballot))
        elif now - watched.young > suspicion:
            watched.votes = None

    async def _vote(self, job: str, watched: _Watched, ballot: LinkVotes) -> None:
        try:
            await ballot.collect(self._request)
            watched.votes = ballot
        finally:
            watched.ballot = None
            self._verdicts.pop(job, None)
            self._wake()

    def forget_all_but(self, jobs: Iterable[str]) -> None:
        """Drop what is kept of other jobs: a later one may have the same name."""
        kept = set(jobs)
        for gone in self._watched.keys() - kept:
            del self._watched[gone]
            self._verdicts.pop(gone, None)

    def verdict(self, job: Job) -> CutVerdict:
        """Which hosts the job must leave. Not before other hosts have voted: if none of them
        reaches those that would stay, the network is down for more than one host, and there is no
        better place. Then the job waits where it is, as its connections do."""
        now = time.monotonic()
        state = job.state, job.rewinds, sum(capsule.epoch for capsule in job.capsules.values())
        until, of, known = self._verdicts.get(job.name, (0.0, state, NOTHING))
        if now < until and of == state:
            return known
        made = self._judge(job, now)
        if job.name in self._watched:
            self._verdicts[job.name] = now + self._limits.heartbeat / 4, state, made
        return made

    def _judge(self, job: Job, now: float) -> CutVerdict:
        cut = self._pairs(job, now, self._limits.suspicion)
        watched = self._watched.get(job.name)
        votes = watched.votes if watched is not None else None
        hosts = {host for pair in cut for host in pair}
        if not cut or votes is None or not hosts <= votes.about:
            return NOTHING
        capsules = Counter(capsule.host for capsule in job.capsules.values())
        for votes_first in (False, True):
            leaves = hosts_to_leave(
                cut, self._left.pairs(), votes.count(), capsules, votes_first=votes_first
            )
            stay = hosts - set(leaves)
            if reach := votes.reach(stay):
                return CutVerdict(
                    *(frozenset(leaves), _text(cut), reach, votes.miss(stay)),
                    *(max(cut.values()), frozenset(cut)),
                )
        return CutVerdict(waits=f"{_text(cut)}, and no other host reaches those that would stay")

    def suspects(self, job: Job) -> bool:
        """Whether hosts of a job may not reach each other now. Not for longer than a decision may
        take: what ends while the job waits for a link is its own affair."""
        young = self._pairs(job, time.monotonic(), EARLY * self._limits.heartbeat)
        return bool(young) and max(young.values()) < self._limits.suspicion + self._limits.fault

    def fault_before(self, job: Job) -> str:
        """Which hosts of a job did not reach each other within the last ``timeouts.fault`` seconds,
        as text; "" if there are none."""
        if (watched := self._watched.get(job.name)) is None:
            return ""
        ago = time.monotonic() - watched.young
        return f"{watched.fault} until {ago:.1f} s before" if ago < self._limits.fault else ""

    def _pairs(self, job: Job, now: float, least: float) -> dict[Pair, float]:
        """As :func:`silences`, unless networks of the job may have been locked a moment ago."""
        watched = self._watched.get(job.name)
        if watched is None or job.state != "running" or now - watched.held < self._limits.suspicion:
            return {}
        return silences(job, now, self._limits, least)


def _text(pairs: Collection[Pair], do: str = "do") -> str:
    """The first pairs, and the number of the others. The same for as long as they are the same."""
    named = sorted(pairs)[:NAMED_PAIRS]
    each = [f"{one} and {other} {do} not reach each other" for one, other in named]
    more = len(pairs) - len(each)
    return "; ".join(each) + (f"; nor {do} {more} other pairs of hosts" if more else "")
