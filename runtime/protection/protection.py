# SPDX-License-Identifier: Apache-2.0
"""Protection: when a snapshot of a job is due, and what became of it.

A holder that is lost, or that gets a capsule of the job itself, is replaced at once by a snapshot
that other hosts keep. A snapshot that fails harms only itself. The job still has the one before it,
as the journal says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from ... import units
from ...errors import LiveshiftError
from ..daemon.tasks import Tasks
from ..fleet.fleet import Fleet
from ..model.holders import die_together
from ..model.interval import expected_cost
from ..model.jobs import Job
from ..model.snapshots import NEEDED_AT_ONCE, SHORT
from ..snapshot import protection_row
from ..snapshot.context import SnapshotContext
from ..snapshot.protection_notes import ProtectionNotes, same, words
from ..snapshot.protection_row import Holders, exposed, holders_of, lost_images
from ..snapshot.slowness import TAKES_S, Slowness
from ..snapshot.snapshot import Snapshot
from .job_snapshots import JobSnapshots

log = logging.getLogger("liveshift.protection")

TICK_S = 0.2
FIRST_S = 30.0
"""A job's first snapshot is due after this many seconds, or sooner if its interval is shorter."""
RETRY_S, AT_MOST_S = 30.0, 600.0
"""After a failure the next attempt comes RETRY_S seconds later, or sooner if the interval is
shorter. After failures in a row the wait doubles up to AT_MOST_S seconds, or up to the interval."""
REST = 4.0
"""Between two snapshots a job trains for at least so many times as long as the last one has paused
it, also where a busy host takes longer for one than the interval is."""
STRONG_AT_FIRST = 3
"""So many attempts in a row must not replace a snapshot that any one death leaves whole by one that
a death can destroy. After them such a snapshot is better than one that only grows older."""
AGAIN_S, EACH_HOST_S = 1.0, 0.01
"""While no host can hold a snapshot, the hosts are looked at again after AGAIN_S seconds, and
EACH_HOST_S for each of them."""


@dataclass
class _State:
    """What the snapshots of one job have come to. ``due``: monotonic seconds."""

    job: Job
    notes: ProtectionNotes
    due: float
    failures: int = 0
    rested: float = 0.0
    """When the job has trained for long enough since the last snapshot; monotonic seconds."""
    exposed: str = ""
    """Why the job's newest snapshot could not be used, when it was last looked at."""
    look: float = 0.0
    """When to look whether a host can hold a snapshot, before one is due; monotonic seconds."""
    nowhere: str = ""
    """Why no host can, when that was last looked at. The history has it."""
    failed: str = ""
    """Why the last attempt failed; "" if it did not. The history has it."""


class Protection:
    """The orchestrator has one instance, which takes the snapshots that are due of running jobs.
    Its task ``run`` looks at the jobs every TICK_S seconds. If a job gets none, Job.unprotected
    says why."""

    def __init__(self, fleet: Fleet, context: SnapshotContext, snapshots: JobSnapshots) -> None:
        self._fleet = fleet
        self._context = context
        self._snapshots = snapshots
        self._states: dict[str, _State] = {}  # by job
        self._hosts = Holders.of(())
        self._tasks = Tasks()

    async def run(self) -> None:
        # After a restart no host is up before it has reported: none of them is lost for that.
        until = time.monotonic() + 2 * self._fleet.cluster.timeouts.suspicion
        while not all(h.heard for h in self._fleet.hosts.values()) and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        while True:
            now = time.monotonic()
            jobs = self._fleet.jobs
            self._states = {
                name: state
                for name, state in self._states.items()
                if jobs.get(name) is state.job and state.job.state != "suspended"
            }
            self._hosts = _holders(self._fleet)
            for job in list(jobs.values()):
                if job.state == "running" and not self._snapshots.taken_up(job):
                    self._look(job, now)
            await asyncio.sleep(TICK_S)

    # ---- one job -------------------------------------------------------------------------------

    def _look(self, job: Job, now: float) -> None:
        """Begin a snapshot of the job if one is due and possible."""
        every = self._every(job)
        if not every:
            self._drop(job, "snapshots are off")  # it would only grow older
            return
        state = self._states.get(job.name)
        if state is None:
            notes = ProtectionNotes(self._fleet.journal, job)
            state = self._states[job.name] = _State(job, notes, now + min(every, FIRST_S))
        hosts, before = self._hosts, state.exposed
        for host in holders_of(job):
            if hosts.left.get(host, 1.0) < NEEDED_AT_ONCE:
                self._drop(job, f"{host} needs its memory for what runs there")
        state.exposed = exposed(job, self._fleet.cluster.domains, hosts)
        if state.exposed and state.exposed != before:
            state.notes.unprotected(state.exposed)
            state.due = min(state.due, max(now, state.rested))
        if now < min(state.due, state.look):
            return
        if hindrance := self._snapshots.hindrance(job):
            job.unprotected = hindrance
            return
        holders = self._snapshots.holders(job)
        if isinstance(holders, str):
            again = now + AGAIN_S + EACH_HOST_S * len(self._fleet.hosts)
            state.look, state.due = again, max(state.due, again)
            job.unprotected = holders
            if state.nowhere != holders:
                state.nowhere = holders
                state.notes.failed(holders, "")
            return
        state.look, state.nowhere, job.unprotected = math.inf, "", state.failed
        if now < state.due:
            return
        try:
            asked = job.snapshots_asked(self._fleet.cluster)
            weaker = state.failures >= STRONG_AT_FIRST or bool(lost_images(job, hosts))
            snapshot = self._snapshots.begin(job, holders, asked=asked, weaker=weaker)
        except LiveshiftError as error:
            self._failed(state, words(error), "")
            return
        self._tasks.spawn(self._follow(snapshot, state, now))

    def _every(self, job: Job) -> float:
        return job.snapshot_every(self._fleet.cluster, self._fleet.failures.seen)

    def _drop(self, job: Job, why: str) -> None:
        """Let go of the job's snapshot. The holders then learn from their claims that they need not
        keep it."""
        if job.newest is None:
            return
        try:
            self._fleet.journal.snapshots.drop_snapshots(job.name)
        except LiveshiftError as error:  # the next look tries again
            log.error("%s of %s stays: %s", job.newest.name, job.name, error)
            return
        self._fleet.journal.note(
            job.name,
            "unprotected",
            f"not protected: {job.newest.name} is dropped, {why}",
        )
        job.newest = None

    async def _follow(self, snapshot: Snapshot, state: _State, begun: float) -> None:
        job, cluster = snapshot.job, self._fleet.cluster
        measured = job.snapshots_auto(cluster) and self._every(job) > 2 * TAKES_S
        slowness = Slowness(self._context, snapshot.name, next(iter(job.capsules.values())))
        if measured:
            await slowness.begin()
        await snapshot.run()
        self._snapshots.end(snapshot)
        if (made := snapshot.generation) is not None:
            parts = ", ".join(f"{name} {s:.3f}" for name, s in snapshot.seconds.items())
            log.info(
                "%s of %s: complete, %s, paused for %.3f s (%s), %s",
                *(snapshot.name, job.name, units.size(made.bytes), snapshot.pause_s, parts),
                made.boundary,
            )
            job.pause_s, job.unprotected = snapshot.pause_s, ""
            cost = job.snapshot_cost or expected_cost(0)  # which the first one replaces
            job.snapshot_cost = cost.after(snapshot.pause_s, time.monotonic() - begun)
            every = self._every(job)
            state.rested = time.monotonic() + REST * snapshot.pause_s
            state.failures, state.failed, state.due = 0, "", max(begun + every, state.rested)
            self._note_protected(state, every)
            if measured:
                self._tasks.spawn(self._measure(slowness, snapshot, state, begun))
        elif snapshot.abandoned:
            job.unprotected = str(snapshot.error)  # due again as soon as nothing hinders it
        elif job.state == "running":
            self._failed(state, words(snapshot.error), snapshot.name, snapshot.pause_s)

    def _note_protected(self, state: _State, every: float) -> None:
        """Note who holds the snapshot that is just complete, or why it does not protect. If that is
        because there are too few copies, the next one is not urgent, as it would have no more."""
        job, cluster = state.job, self._fleet.cluster
        owners = list(job.owners.values())
        why = exposed(job, cluster.domains, _holders(self._fleet))
        weak = job.newest and die_together(job.newest.holders, owners, cluster.domains)
        state.exposed = why if weak else ""
        if why:
            state.notes.unprotected(why)
            return
        hosts = ", ".join(holders_of(job))
        text = f"a snapshot every {protection_row.seconds(every)}, held by {hosts}"
        # An interval that was chosen changes a little with each snapshot.
        key = hosts if job.snapshots_auto(cluster) else text
        if host := protection_row.only_host(job, cluster):
            text += f"; if {host} died, `liveshift rewind {job.name} --lost {host}` would be needed"
        state.notes.protected(text, f"{key}; {host}")

    async def _measure(
        self, slowness: Slowness, snapshot: Snapshot, state: _State, begun: float
    ) -> None:
        """Measure how much the snapshot has slowed the job down, and choose the interval again."""
        job, name = snapshot.job, snapshot.name
        seconds = await slowness.end(snapshot.pause_s)
        if seconds is None or job.snapshot_cost is None:
            return
        if job.taking or job.newest is None or job.newest.name != name:
            return  # what was measured was not this snapshot alone
        job.snapshot_cost = job.snapshot_cost.slowed(seconds)
        state.due = begun + self._every(job)
        log.info("%s of %s: slowed it down by %.2f s besides the pause", name, job.name, seconds)

    def _failed(self, state: _State, why: str, name: str, paused: float = 0.0) -> None:
        """Wait for the next attempt, and note why there was none or why ``name`` failed.
        ``paused``: seconds for which the attempt has paused the job, for nothing."""
        cluster = self._fleet.cluster
        every = self._every(state.job)
        wait = min(min(every, RETRY_S) * 2**state.failures, max(every, AT_MOST_S))
        rest = paused / cluster.snapshots.cost if state.job.snapshots_auto(cluster) else 0.0
        state.due = time.monotonic() + max(wait, rest)
        state.failures = min(state.failures + 1, 30)
        state.job.unprotected, before, state.failed = why, state.failed, why
        log.warning("%s: %s: %s", state.job.name, name or "no snapshot", why)
        if same(before) != same(why):
            state.notes.failed(why, name)


def _holders(fleet: Fleet) -> Holders:
    """The hosts as they are now, for all jobs: there may be a thousand of each."""
    hosts = fleet.hosts.items()
    return Holders(
        set(fleet.up()),
        {name: host.lost for name, host in hosts if host.lost},
        {name: host.memory_left for name, host in hosts if host.memory_left < SHORT},
    )
