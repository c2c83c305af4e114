# SPDX-License-Identifier: Apache-2.0
"""Protection: when a snapshot of a job is due, which hosts keep it, and what became of it.

A job has one snapshot under way at most, and none while one of its capsules moves: both need the
tracker of the capsule's memory. A move that begins meanwhile ends the snapshot, and the next one
is taken after the move. A holder that is lost, or that gets a capsule of the job itself, is
replaced at once by a snapshot that other hosts keep.

A snapshot that fails harms only itself. The job still has the one before it, as the journal says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from ... import units
from ...errors import LiveshiftError
from ..daemon.tasks import Tasks
from ..messages import ProtectionRow
from ..model.jobs import Job
from ..model.snapshots import choose_holders
from ..snapshot.context import SnapshotContext
from ..snapshot.snapshot import Snapshot
from .fleet import Fleet

log = logging.getLogger("liveshift.protection")

TICK_S = 0.2
FIRST_S = 30.0
"""A job's first snapshot is due after this many seconds, or sooner if its interval is shorter."""
AT_MOST_S = 600.0
"""After failures in a row the wait doubles up to this many seconds, or up to the interval."""


@dataclass
class _State:
    """What the snapshots of one job have come to. ``due``: monotonic seconds."""

    job: Job
    due: float
    failures: int = 0
    exposed: str = ""
    """Why the job's newest snapshot could not be used, when it was last looked at."""
    noted: str = ""
    """The last line in the history about whether the job is protected. Each is noted once."""
    failed: str = ""
    """The message of the last failure that the history has."""
    avoid: set[str] = field(default_factory=set)
    """Hosts that have refused an image."""


class Protection:
    def __init__(self, fleet: Fleet, context: SnapshotContext) -> None:
        self._fleet = fleet
        self._context = context
        self._journal = fleet.journal.snapshots
        self._states: dict[str, _State] = {}  # by job
        self._tasks = Tasks()

    def recover(self) -> None:
        """Undo the snapshots that an earlier orchestrator has left under way."""
        for number, name in self._journal.snapshots_under_way():
            job = self._fleet.jobs.get(name)
            if job is None or job.state in ("ended", "rewinding"):  # a rewind opens the gates
                self._give_up(number)
                continue
            snapshot = Snapshot(self._context, number, job, {})
            self._begin(snapshot)
            self._tasks.spawn(self._recover(snapshot))

    async def run(self) -> None:
        # After a restart no host is up before it has reported: none of them is lost for that.
        until = time.monotonic() + 2 * self._fleet.cluster.timeouts.suspicion
        while not all(h.heard for h in self._fleet.hosts.values()) and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        while True:
            now = time.monotonic()
            jobs = self._fleet.jobs
            self._states = {n: s for n, s in self._states.items() if jobs.get(n) is s.job}
            for job in list(jobs.values()):
                if job.state == "running" and job.name not in self._fleet.snapshots:
                    self._look(job, now)
            await asyncio.sleep(TICK_S)

    # ---- one job -------------------------------------------------------------------------------

    def _look(self, job: Job, now: float) -> None:
        """Begin a snapshot of the job if one is due and possible."""
        every = job.snapshot_every(self._fleet.cluster)
        if not every:
            return
        state = self._states.get(job.name)
        if state is None:
            state = self._states[job.name] = _State(job, now + min(every, FIRST_S))
        before, state.exposed = state.exposed, exposed(self._fleet, job)
        if state.exposed and state.exposed != before:
            self._note(state, "unprotected", state.exposed)
            state.due = now
        if now < state.due:
            return
        if hindrance := self._hindrance(job):
            job.unprotected = hindrance
            return
        try:
            holders = self._holders(state)
            if isinstance(holders, str):
                self._failed(state, holders, "")
                return
            number = self._journal.begin_snapshot(job.name)
        except LiveshiftError as error:
            self._failed(state, _words(error), "")
            return
        snapshot = Snapshot(self._context, number, job, holders)
        self._begin(snapshot)
        self._tasks.spawn(self._follow(snapshot, state, now + every))

    def _hindrance(self, job: Job) -> str:
        """Why no snapshot can be taken right now, in words; that will pass. "" if one can."""
        moving = [each.name for each in self._fleet.under_way() if each.job is job]
        if moving:
            return f"{', '.join(moving)} is under way: the next snapshot is taken after it"
        for capsule in job.capsules.values():
            if capsule.code is not None:
                return f"{capsule.name} has ended"
            if not (capsule.started and capsule.granted):
                return f"{capsule.name} does not run yet"
            if not self._fleet.is_up(capsule.host):
                return f"{capsule.host}, which runs {capsule.name}, is not up"
        return ""

    def _holders(self, state: _State) -> dict[str, str] | str:
        job, cluster = state.job, self._fleet.cluster
        owners = {c.name: c.host for c in job.capsules.values()}
        before = {c: hosts[0] for c, hosts in job.newest.holders.items()} if job.newest else {}
        views = self._fleet.views()
        willing = [view for view in views if view.name not in state.avoid]
        chosen = choose_holders(willing, owners, cluster.domains, before)
        if isinstance(chosen, str) and state.avoid:
            state.avoid.clear()  # they may have room by now
            chosen = choose_holders(views, owners, cluster.domains, before)
        return chosen

    # ---- one snapshot --------------------------------------------------------------------------

    def _begin(self, snapshot: Snapshot) -> None:
        snapshot.job.taking = snapshot.number  # so its holders keep what they have of it
        self._fleet.snapshots[snapshot.job.name] = snapshot

    def _end(self, snapshot: Snapshot) -> None:
        job = snapshot.job
        if self._fleet.snapshots.get(job.name) is snapshot:
            del self._fleet.snapshots[job.name]
        if job.taking == snapshot.number:
            job.taking = 0
        if snapshot.generation is None:
            self._give_up(snapshot.number)

    def _give_up(self, number: int) -> None:
        try:
            self._journal.give_up_snapshot(number)
        except LiveshiftError as error:  # a later orchestrator gives it up again
            log.error("s%d is given up, and this cannot be recorded: %s", number, error)

    async def _recover(self, snapshot: Snapshot) -> None:
        """Undo it once the job's hosts are up; wait for them for twice timeouts.suspicion."""
        timeouts = self._fleet.cluster.timeouts
        until = time.monotonic() + 2 * timeouts.suspicion
        hosts = {capsule.host for capsule in snapshot.job.capsules.values()}
        while not all(map(self._fleet.is_up, hosts)) and time.monotonic() < until:
            await asyncio.sleep(timeouts.heartbeat / 10)
        await snapshot.recover()
        self._end(snapshot)

    async def _follow(self, snapshot: Snapshot, state: _State, due: float) -> None:
        await snapshot.run()
        self._end(snapshot)
        job = snapshot.job
        if (made := snapshot.generation) is not None:
            parts = ", ".join(f"{name} {s:.3f}" for name, s in snapshot.seconds.items())
            log.info(
                "%s of %s: complete, %s, paused for %.3f s (%s), %s",
                *(snapshot.name, job.name, units.size(made.bytes), snapshot.pause_s, parts),
                made.boundary,
            )
            job.pause_s, job.unprotected = snapshot.pause_s, ""
            state.failures, state.failed, state.due = 0, "", due
            state.avoid.clear()
            every = job.snapshot_every(self._fleet.cluster)
            hosts = ", ".join(holders_of(job))
            self._note(state, "protected", f"a snapshot every {every:g} s, held by {hosts}")
        elif snapshot.abandoned:
            job.unprotected = str(snapshot.error)  # due again as soon as nothing hinders it
        elif job.state == "running":
            state.avoid |= snapshot.refused
            self._failed(state, _words(snapshot.error), snapshot.name)

    def _failed(self, state: _State, why: str, name: str) -> None:
        """Wait for the next attempt, and note why there was none or why ``name`` failed."""
        job = state.job
        every = job.snapshot_every(self._fleet.cluster)
        state.due = time.monotonic() + min(every * 2**state.failures, max(every, AT_MOST_S))
        state.failures = min(state.failures + 1, 30)
        job.unprotected = why
        log.warning("%s: %s: %s", job.name, name or "no snapshot", why)
        if job.newest is None:
            self._note(state, "unprotected", why)
        elif state.failed != why:
            state.failed = why
            text = f"{name} failed: {why}" if name else why
            self._fleet.journal.note(job.name, "snapshot", f"{text}; {job.newest.name} stays")

    def _note(self, state: _State, kind: str, text: str) -> None:
        if state.noted != text:
            state.noted = text
            self._fleet.journal.note(state.job.name, kind, text)


def _words(error: LiveshiftError | None) -> str:
    return f"{error} ({error.hint})" if error is not None and error.hint else str(error)


# ---- what status shows -------------------------------------------------------------------------


def holders_of(job: Job) -> list[str]:
    """The hosts that keep the job's newest snapshot."""
    return sorted({h for hosts in job.newest.holders.values() for h in hosts} if job.newest else ())


def exposed(fleet: Fleet, job: Job) -> str:
    """Why the job's newest snapshot would not do if a host died now, in words; "" if it would, or
    if there is none."""
    if job.newest is None:
        return ""
    name, domains = job.newest.name, fleet.cluster.domains
    beside = {domains.get(c.host, c.host): c for c in job.capsules.values() if c.code is None}
    for holder in holders_of(job):
        if not fleet.is_up(holder):
            return f"{holder}, which keeps {name}, is not up"
        if capsule := beside.get(domains.get(holder, holder)):
            where = "there" if capsule.host == holder else f"in its failure domain ({capsule.host})"
            return f"{holder} keeps {name}, and {capsule.name} runs {where}"
    return ""


def row(fleet: Fleet, job: Job) -> ProtectionRow | None:
    """What `status` shows of the job's snapshots."""
    if job.state == "ended":
        return None
    every, newest = job.snapshot_every(fleet.cluster), job.newest
    if newest is None:
        why = (job.unprotected or "no snapshot is complete yet") if every else ""
        return ProtectionRow(every, why_not=why)
    age = max(0.0, time.time() - newest.time)
    why = exposed(fleet, job)
    return ProtectionRow(every, newest.name, age, newest.bytes, holders_of(job), job.pause_s, why)
