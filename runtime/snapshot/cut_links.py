# SPDX-License-Identifier: Apache-2.0
"""Notices that hosts of a job do not reach each other, though the orchestrator hears them all, and
chooses which of them the job leaves.

Each agent reports the peers of its capsules that answer neither a connection nor an echo
(agent/host/peer_links.py). A peer is silent, too, while a move or a snapshot has locked its
network, and once its command has ended. So such times do not count, nor do those in which the job
trains all the same. link_votes.py asks other hosts which of the two they reach.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

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
    themselves; and nothing as long as any capsule of the job finishes collectives."""
    if not any(c.seen is not None and c.seen.unanswered for c in job.capsules.values()):
        return {}
    fresh, recent = now - MISSED * limits.heartbeat, now - (limits.suspicion - limits.heartbeat)
    if any(capsule.progressed > recent for capsule in job.capsules.values()):
        return {}
    living = [c for c in job.capsules.values() if _lives(c) and c.reported > fresh]
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
) -> list[str]:
    """Choose hosts until no cut link is left among the others. The next one is always the one with
    the most cut links, those of ``before`` with them; then the one that the fewest other hosts
    reach (``reached``); then the one with the fewest capsules."""
    earlier = Counter(host for pair in {*before} - {*pairs} for host in pair)
    left, chosen = list(pairs), list[str]()
    while left:
        count = Counter(host for pair in left for host in pair)
        worst = max(
            count,
            key=lambda h: (count[h] + earlier[h], -reached.get(h, 0), -capsules.get(h, 0), h),
        )
        chosen.append(worst)
        left = [pair for pair in left if worst not in pair]
    return chosen


@dataclass
class _Watched:
    """What is kept of a protected job."""

    held: float  # when its networks were last locked, perhaps
    votes: LinkVotes | None = None  # since links are suspected
    fault: tuple[float, str] = (float("-inf"), "")  # when links were last cut, and which


@dataclass(frozen=True)
class Verdict:
    """Which hosts a job leaves, and why, as text. ``avoid``: hosts that do not reach those that
    stay either. ``seconds``: for how long links have been cut. ``pairs``: which ones. ``waits``:
    why it leaves none although links are cut, as text, or ""."""

    leaves: dict[str, str] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    seconds: float = 0.0
    pairs: frozenset[Pair] = frozenset()
    waits: str = ""


NOTHING = Verdict()


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
        self._verdicts: dict[str, tuple[float, tuple[str, int], Verdict]] = {}

    def look(self, job: Job, *, paused: bool) -> None:
        """Follow a protected job. The caller does so several times per heartbeat."""
        now = time.monotonic()
        watched = self._watched.setdefault(job.name, _Watched(self._began))
        if paused or job.state != "running":
            watched.held = now
        self._verdicts.pop(job.name, None)
        young = self._pairs(job, now, EARLY * self._limits.heartbeat)
        if not young:
            watched.votes = None
            return
        watched.fault = now, _text(young, "did")
        suspected = {host for pair in young for host in pair}
        if watched.votes is None or not suspected <= watched.votes.about:
            watched.votes = LinkVotes(job, suspected, self._heard(), self._limits)
            self._tasks.spawn(self._vote(watched.votes))

    async def _vote(self, votes: LinkVotes) -> None:
        await votes.collect(self._request)
        self._wake()

    def forget_all_but(self, jobs: Iterable[str]) -> None:
        """Drop what is kept of other jobs: a later one may have the same name."""
        kept = set(jobs)
        for gone in self._watched.keys() - kept:
            del self._watched[gone]
            self._verdicts.pop(gone, None)

    def verdict(self, job: Job) -> Verdict:
        """Which hosts the job must leave. Not before other hosts have voted: if none of them
        reaches those that would stay, the network is down for more than one host, and there is no
        better place. Then the job waits where it is, as its connections do."""
        now, state = time.monotonic(), (job.state, job.rewinds)
        until, of, known = self._verdicts.get(job.name, (0.0, state, NOTHING))
        if now < until and of == state:
            return known
        made = self._judge(job, now)
        self._verdicts[job.name] = now + self._limits.heartbeat / 4, state, made
        return made

    def _judge(self, job: Job, now: float) -> Verdict:
        cut = self._pairs(job, now, self._limits.suspicion)
        watched = self._watched.get(job.name)
        if not cut or watched is None or watched.votes is None or not watched.votes.complete:
            return NOTHING
        votes, hosts = watched.votes, {host for pair in cut for host in pair}
        capsules = Counter(capsule.host for capsule in job.capsules.values())
        chosen = hosts_to_leave(cut.keys(), self._left.pairs(), votes.count(), capsules)
        stay = hosts - set(chosen)
        if not votes.reach(stay):
            return Verdict(waits=f"{_text(cut)}, and no other host reaches those that would stay")
        leaves = {h: _text({p: s for p, s in cut.items() if h in p}) for h in chosen}
        return Verdict(leaves, votes.miss(stay), max(cut.values()), frozenset(cut))

    def suspects(self, job: Job) -> bool:
        """Whether hosts of a job may not reach each other now."""
        return bool(self._pairs(job, time.monotonic(), EARLY * self._limits.heartbeat))

    def fault_before(self, job: Job) -> str:
        """Which hosts of a job did not reach each other within the last ``timeouts.fault`` seconds,
        as text; "" if there are none."""
        watched = self._watched.get(job.name)
        when, text = watched.fault if watched is not None else (float("-inf"), "")
        ago = time.monotonic() - when
        return f"{text} until {ago:.1f} s before" if ago < self._limits.fault else ""

    def _pairs(self, job: Job, now: float, least: float) -> dict[Pair, float]:
        """As :func:`silences`, unless networks of the job may have been locked a moment ago."""
        watched = self._watched.get(job.name)
        held = watched.held if watched is not None else self._began
        if job.state != "running" or now - held < self._limits.suspicion:
            return {}
        return silences(job, now, self._limits, least)


def _text(pairs: Mapping[Pair, float], do: str = "do") -> str:
    """The pairs that have been cut for longest, by name, and the number of the others."""
    longest = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:NAMED_PAIRS]
    each = [f"{one} and {other} {do} not reach each other" for one, other in sorted(longest)]
    more = len(pairs) - len(each)
    return "; ".join(each) + (f"; nor {do} {more} other pairs of hosts" if more else "")
