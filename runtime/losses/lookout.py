# SPDX-License-Identifier: Apache-2.0
"""Keeps what is known of lost hosts and lost capsules: heartbeats, attempts to reach a kernel, what
hosts have reported to lack, and what people have declared dead. watch.py judges hosts by it, and
cut_links.py the links between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ..config.cluster import Cluster
from ..control.kernels import Kernels
from ..daemon.tasks import Tasks
from ..messages import LAUNCHER_S, CapsuleEnded, CapsuleState, DeviceError, Message
from ..model.jobs import KILLED, Capsule, Job
from .cut_links import CutLinks, CutVerdict
from .left_hosts import LeftHosts
from .peer_votes import PeerVotes
from .watch import MISSED, HostContact, lost_hosts, perhaps_dead, suspected


@dataclass(frozen=True)
class Lack:
    """A capsule that is certainly lost, and why. ``epoch``: the one under which its host had it.

    ``code``: the exit code of its command, if it is not taken back. ``stays``: its host is fine.
    ``died``: None unless its end has caused the rewind. Then this is how many collectives it had
    finished; 0 if not known. ``since``: when its command has ended, or a rank of it before, in
    monotonic seconds; None if not known.
    """

    epoch: int
    why: str
    code: int = KILLED
    stays: bool = False
    died: int | None = None
    since: float | None = None


class Lookout:
    """``heard``: for each host of the cluster, when its agent was last heard, in monotonic seconds;
    0 for never. ``paused``: whether the ranks of a job are held at their gates. ``opened``: when
    all hosts of a job last said that they are not. ``locked``: whether networks of a job may be
    locked, so that its peers do not answer each other. ``wake`` is called when something new is
    known. ``request`` sends a request to a host's agent. ``left``: the hosts that jobs have left
    because of their links.
    """

    def __init__(
        self,
        cluster: Cluster,
        heard: Callable[[], dict[str, float]],
        paused: Callable[[Job], bool],
        opened: Callable[[Job], float],
        locked: Callable[[Job], bool],
        wake: Callable[[], None],
        request: Callable[[str, Message, float], Awaitable[Message | None]],
        left: LeftHosts,
    ) -> None:
        self._cluster = cluster
        self._limits = cluster.timeouts
        self._heard = heard
        self._is_paused = paused
        self._is_locked = locked
        self._opened = opened
        self._wake = wake
        self._began = time.monotonic()
        self._answers: dict[str, tuple[float, bool]] = {}  # by host: when it was tried, the result
        self._kernels = Kernels()
        self._probing: set[str] = set()
        self._faults: dict[str, float] = {}  # by host: when it and its kernel were last silent
        self._device_errors: dict[str, list[tuple[float, DeviceError]]] = {}  # by host: when, what
        self._paused: dict[str, float] = {}  # by job: when it was last seen paused
        self._peers = PeerVotes(cluster.timeouts, request, wake)
        self._perhaps_dead: dict[str, list[str]] = {}  # by job; see watch.perhaps_dead
        self._missing: dict[str, Lack] = {}  # by capsule
        self._vouched: dict[tuple[str, str], tuple[float, str]] = {}  # by job and host
        self._ordered: dict[str, tuple[int, float, str]] = {}  # by job: its rewinds, until, why
        self._tasks = Tasks()
        self._cut_links = CutLinks(cluster.timeouts, heard, request, wake, left)

    # ---- what is reported ----------------------------------------------------------------------

    def note_heartbeat(self, capsule: Capsule, seen: CapsuleState) -> None:
        """Take the owner's report on a capsule, before ``capsule.seen`` becomes it."""
        capsule.note_report(time.monotonic(), self._limits.suspicion)
        if capsule.seen is not None and seen.collectives > capsule.seen.collectives:
            capsule.progressed = capsule.reported
        for gpu in seen.gpus:
            capsule.gpus_used[gpu] = capsule.reported

    def note_device_errors(self, host: str, errors: Sequence[DeviceError]) -> None:
        """Take a host's report on errors of its GPUs; each one replaces the one before."""
        now = time.monotonic()
        self._device_errors[host] = [(now - error.ago, error) for error in errors]

    def lacks(self, capsule: Capsule, why: str) -> None:
        """A host does not have a capsule that it was let run, under the present epoch."""
        self._lose(capsule, Lack(capsule.epoch, why))

    def ended(self, capsule: Capsule, why: str, end: CapsuleEnded, died: int | None = None) -> None:
        """The command of a capsule has ended, under the present epoch; ``died``: see Lack."""
        since = time.monotonic() - end.ago_s if end.ago_s else None
        self._lose(capsule, Lack(capsule.epoch, why, end.code, True, died, since))

    def _lose(self, capsule: Capsule, lack: Lack) -> None:
        self._missing[capsule.name] = lack
        self._wake()

    def vouch(self, job: Job, host: str, by: str) -> None:
        """A person, or the command of ``snapshots.fence``, says that a host of the job is dead.
        That counts until the host is heard."""
        self._vouched[job.name, host] = self._heard().get(host, 0.0), by
        self._wake()

    def order(self, job: Job, why: str, within: float) -> None:
        """A person wants the job rewound once. If that does not begin within so many seconds, the
        order is void: no person expects it any more."""
        self._ordered[job.name] = job.rewinds, time.monotonic() + within, why
        self._wake()

    def begin_anew(self, capsule: Capsule) -> None:
        """Forget how far a capsule had come: it goes back to a snapshot."""
        capsule.progressed = 0.0

    def watch(self, jobs: Iterable[Job], besides: Iterable[str] = ()) -> None:
        """Look which of the jobs are paused, and begin to try the kernels of suspected hosts: those
        of the jobs, and ``besides``. The caller does so several times per heartbeat."""
        now, seen, jobs = time.monotonic(), self._seen(), list(jobs)
        since = now - MISSED * self._limits.heartbeat
        hosts = {host for host in besides if host in seen and seen[host].heard < since}
        self._cut_links.forget_all_but(job.name for job in jobs)
        self._peers.forget_all_but(job.name for job in jobs)
        self._perhaps_dead.clear()
        for job in jobs:
            if self._is_paused(job):
                self._paused[job.name] = now
            self._cut_links.follow(job, locked=self._is_locked(job))
            self._perhaps_dead[job.name] = perhaps_dead(job, seen, now, self._limits)
            late = suspected(job, seen, now, self._limits)
            hosts.update(late)
            if self._paused_since(job):  # else the others show whether the job trains
                self._peers.ask_about(job, late, seen)
        self._faults |= {h: now for h in hosts if h in seen and seen[h].answers is False}
        for host in (hosts & seen.keys()) - self._probing:
            self._probing.add(host)
            self._tasks.spawn(self._probe(host))

    async def _probe(self, host: str) -> None:
        began = time.monotonic()
        limit = self._limits.suspicion - MISSED * self._limits.heartbeat  # known when that is over
        try:
            answers = await self._kernels.answers(str(self._cluster.host(host).data), limit)
            self._answers[host] = began, answers
            self._wake()
            await asyncio.sleep(self._limits.heartbeat)  # some failures come at once
        finally:
            self._probing.discard(host)

    # ---- what follows --------------------------------------------------------------------------

    def lost(self, job: Job) -> set[str]:
        """The capsules of a job that need another host: their hosts are lost, or came back without
        them, or have links that are cut, or their GPUs have just failed."""
        silent, lacking = {*self.silent(job), *self.links(job).leaves}, self.lacking(job)
        gone = {name for name, lack in lacking.items() if not lack.stays}
        gone |= self._device_faults(job, LAUNCHER_S).keys()
        return {c.name for c in job.capsules.values() if c.host in silent} | gone

    def links(self, job: Job) -> CutVerdict:
        """Which hosts a job must leave because they do not reach each other."""
        return self._cut_links.verdict(job)

    def lacking(self, job: Job) -> dict[str, Lack]:
        """The capsules that are certainly lost: their hosts have reported without them, or that
        their commands have ended. Only under the present epoch: a rewind gives a new one."""
        every = job.capsules.values()
        found = {c.name: self._missing.get(c.name) for c in every}
        return {c.name: m for c in every if (m := found[c.name]) and m.epoch == c.epoch}

    def vouched(self, job: Job) -> dict[str, str]:
        """The hosts that were called dead, and by whom."""
        heard = self._heard()
        return {
            host: by
            for (name, host), (then, by) in self._vouched.items()
            if name == job.name and heard.get(host, 0.0) == then
        }

    def silent(self, job: Job) -> list[str]:
        """The hosts of a job that count as lost."""
        seen, now, paused = self._seen(), time.monotonic(), self._paused_since(job)
        progress = {c.name: c.progressed for c in job.capsules.values()}
        vouched, unreached = self.vouched(job), self._peers.unreached(job, seen)
        return lost_hosts(job, seen, progress, now, self._limits, paused, vouched, unreached)

    def _paused_since(self, job: Job) -> float:
        """When the job was last seen paused; 0 if all its hosts have said since that it goes on: a
        host that fell silent after that can show that it trains."""
        paused = self._paused.get(job.name, 0.0)
        return paused if paused > self._opened(job) else 0.0

    def why(self, job: Job) -> str:
        """Why a job must be rewound, as text; "" if nothing of it is lost and nobody ordered
        it."""
        lacking, vouched = self.lacking(job), self.vouched(job)
        reasons = [lack.why for lack in lacking.values()]
        for host in self.silent(job):
            says = f"{host} is dead, says {vouched.get(host)}"
            reasons.append(says if host in vouched else f"{host} is silent, and so is its kernel")
        reasons += filter(None, [self.links(job).why])
        rewinds, until, why = self._ordered.get(job.name, (-1, 0.0, ""))
        if rewinds == job.rewinds and time.monotonic() < until:
            reasons.append(why)
        return "; ".join(dict.fromkeys(reasons))

    def unnoticed(self, job: Job) -> float | None:
        """Seconds that have passed since what calls for a rewind of the job: since the first of its
        lost hosts was last heard, the first rank or command ended, or its links were cut. None if
        no such time is known."""
        seen, now = self._seen(), time.monotonic()
        since = [now - seen[host].heard for host in self.silent(job)]
        since += [now - m.since for m in self.lacking(job).values() if m.since is not None]
        since += [links.seconds] if (links := self.links(job)).leaves else []
        return max(since, default=None)

    def perhaps_dead(self, job: Job) -> dict[str, float]:
        """The hosts of a job of which only a person can say whether they are dead, since none of
        the job's hosts is heard → when each was last heard, in seconds since 1970. As at the last
        :meth:`watch`; none once a person has said so of one. A dead host that the job has left
        since says nothing of these."""
        hosts = self._perhaps_dead.get(job.name)
        present = {capsule.host for capsule in job.capsules.values()}
        if not hosts or not self.vouched(job).keys().isdisjoint(present):
            return {}
        heard, began_1970 = self._heard(), time.time() - time.monotonic()
        return {host: began_1970 + max(heard.get(host, 0.0), self._began) for host in hosts}

    def silent_since(self, host: str) -> float | None:
        """When a host was last heard, in monotonic seconds, if its kernel does not answer either;
        None if it does, or may, or if the cluster file does not have the host."""
        seen = self._seen().get(host)
        return seen.heard if seen is not None and seen.answers is False else None

    def suspects(self, job: Job) -> bool:
        """Whether a host or a link of a job may be lost. A host whose kernel answers only has no
        agent now."""
        seen = self._seen()
        late = suspected(job, seen, time.monotonic(), self._limits)
        gone = any(host in seen and seen[host].answers is not True for host in late)
        return gone or self._cut_links.suspects(job)

    def fault_before(self, job: Job) -> str:
        """Which host of a job was silent within the last ``timeouts.fault`` seconds, and its kernel
        too, or which link was cut, as text; "" if there was none."""
        now = time.monotonic()
        for host in dict.fromkeys(capsule.host for capsule in job.capsules.values()):
            since = now - self._faults.get(host, float("-inf"))
            if since < self._limits.fault:
                return f"{host} and its kernel were silent until {since:.1f} s before"
        return self._cut_links.fault_before(job)

    def was_silent(self, capsule: Capsule) -> bool:
        """Whether the host of a capsule and its kernel have been silent since they last reported
        it."""
        return self._faults.get(capsule.host, float("-inf")) > capsule.reported

    def device_fault_before(self, job: Job, ago: float) -> str:
        """Which GPU of a job had an error less than ``timeouts.fault`` seconds before the moment
        that is ``ago`` seconds ago, as text; "" if none had."""
        return next(iter(self._device_faults(job, ago).values()), "")

    def _device_faults(self, job: Job, ago: float) -> dict[str, str]:
        """The same by capsule. A rank that has failed uses its GPU no longer when its launcher
        ends, and one whose state is off its GPU for a snapshot does not use it for a moment."""
        now, found = time.monotonic(), {}
        since = now - self._limits.fault - min(ago, LAUNCHER_S)
        for capsule in job.capsules.values():
            used = capsule.gpus_since(since - self._limits.fault)
            for when, error in self._device_errors.get(capsule.host, ()):
                if error.gpu in used and when > since:
                    which = f"{error.gpu} of {capsule.host}"
                    found[capsule.name] = f"{which} reported {error.text} {now - when:.1f} s before"
        return found

    def answers(self, host: str) -> bool:
        """Whether a host's agent is heard, or its kernel answers since it is not."""
        seen = self._seen().get(host)
        if seen is None:  # the cluster file does not have it any more
            return False
        late = time.monotonic() - seen.heard >= self._limits.suspicion
        return not late or seen.answers is True

    def _seen(self) -> dict[str, HostContact]:
        # Agents need a moment until they report to an orchestrator that was just started.
        first = self._began + self._limits.suspicion
        seen = {}
        for host, heard in self._heard().items():
            tried, answers = self._answers.get(host, (0.0, True))
            seen[host] = HostContact(max(heard, first), answers if tried > heard else None)
        return seen
