# SPDX-License-Identifier: Apache-2.0
"""Protection: when a snapshot of a job is due, which hosts keep it, and what became of it.

A job has one snapshot under way at most, and none while one of its capsules moves: both need the
tracker of the capsule's memory. A move that begins meanwhile ends the snapshot, and the next one
is taken after the move. A holder that is lost, or that gets a capsule of the job itself, is
replaced at once by a snapshot that other hosts keep.

A person who suspends a job orders its last snapshot here; suspensions.py has what follows.

A snapshot that fails harms only itself. The job still has the one before it, as the journal says.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

from ... import units
from ...errors import LiveshiftError, Refused
from ..daemon.tasks import Tasks
from ..messages import ProtectionRow, SuspensionOrdered
from ..model.interval import expected_cost
from ..model.jobs import Job
from ..model.snapshots import choose_holders
from ..snapshot import protection_row
from ..snapshot.context import SnapshotContext
from ..snapshot.protection_notes import ProtectionNotes, same, words
from ..snapshot.protection_row import exposed, holders_of
from ..snapshot.slowness import TAKES_S, Slowness
from ..snapshot.snapshot import Snapshot
from .fleet import Fleet

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
AGAIN_S = 1.0
"""While no host can hold a snapshot, the hosts are looked at so often."""


@dataclass
class _State:
    """What the snapshots of one job have come to. ``due``: monotonic seconds."""

    job: Job
    notes: ProtectionNotes
    due: float
    failures: int = 0
    exposed: str = ""
    """Why the job's newest snapshot could not be used, when it was last looked at."""
    look: float = 0.0
    """When to look whether a host can hold a snapshot, before one is due; monotonic seconds."""
    nowhere: str = ""
    """Why no host can, when that was last looked at. The history has it."""
    failed: str = ""
    """Why the last attempt failed; "" if it did not. The history has it."""
    avoid: set[str] = field(default_factory=set)
    """Hosts that have refused an image."""


class Protection:
    def __init__(self, fleet: Fleet, context: SnapshotContext) -> None:
        self._fleet = fleet
        self._context = context
        self._journal = fleet.journal.snapshots
        self._states: dict[str, _State] = {}  # by job
        # By a job's name: the job that is to be suspended, and who has ordered it.
        self._suspends: dict[str, tuple[Job, str]] = {}
        self._last: set[str] = set()  # jobs that are suspended once their snapshot is complete
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
        for job in self._fleet.jobs.values():
            if not job.taking:  # else _recover notes it when it has undone that snapshot
                self._note_lost_order(job)

    def suspend(self, who: str, job: Job, *, dry_run: bool) -> SuspensionOrdered:
        """Order that the job's next snapshot suspends the job. If a snapshot is under way, the next
        one follows it. It is tried once, and the job's history says what came of it. Raises
        Refused."""
        if hindrance := self._hindrance(job):
            raise _not_suspended(job, hindrance)
        holders = self._holders(self._states.get(job.name) or self._new_state(job, 0.0))
        if isinstance(holders, str):
            raise _not_suspended(job, holders)
        if not dry_run:
            waits, _ = self._suspends.get(job.name, (None, ""))
            if waits is job or job.name in self._last:
                raise _not_suspended(job, "it is being suspended already")
            self._suspends[job.name] = job, who
            text = "a last snapshot is taken, then it ends everywhere"
            self._fleet.journal.note(job.name, "suspending", text, who)
        return SuspensionOrdered(job.name, holders)

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
                    ordered = self._suspends.pop(job.name, None)
                    if ordered is not None and ordered[0] is job:
                        self._begin_last(job, ordered[1])
                    else:
                        self._look(job, now)
            await asyncio.sleep(TICK_S)

    # ---- one job -------------------------------------------------------------------------------

    def _look(self, job: Job, now: float) -> None:
        """Begin a snapshot of the job if one is due and possible."""
        every = job.snapshot_every(self._fleet.cluster)
        if not every:
            self._switch_off(job)
            return
        state = self._states.get(job.name)
        if state is None:
            state = self._states[job.name] = self._new_state(job, now + min(every, FIRST_S))
        before, state.exposed = state.exposed, self._exposed(job)
        if state.exposed and state.exposed != before:
            state.notes.unprotected(state.exposed)
            state.due = now
        if now < min(state.due, state.look):
            return
        if hindrance := self._hindrance(job):
            job.unprotected = hindrance
            return
        holders = self._holders(state)
        if isinstance(holders, str):
            state.look, state.due = now + AGAIN_S, max(state.due, now + AGAIN_S)
            job.unprotected = holders
            if state.nowhere != holders:
                state.nowhere = holders
                state.notes.failed(holders, "")
            return
        state.look, state.nowhere, job.unprotected = math.inf, "", state.failed
        if now < state.due:
            return
        try:
            number = self._journal.begin_snapshot(job.name)
        except LiveshiftError as error:
            self._failed(state, words(error), "")
            return
        snapshot = Snapshot(self._context, number, job, holders)
        self._begin(snapshot)
        self._tasks.spawn(self._follow(snapshot, state, now))

    def _new_state(self, job: Job, due: float) -> _State:
        return _State(job, ProtectionNotes(self._fleet.journal, job), due)

    def _begin_last(self, job: Job, who: str) -> None:
        """Begin the snapshot with which the job is suspended."""
        holders = self._holders(self._states.get(job.name) or self._new_state(job, 0.0))
        why = self._hindrance(job) or (holders if isinstance(holders, str) else "")
        if why or isinstance(holders, str):
            self._fleet.journal.note(job.name, "not suspended", f"the job goes on: {why}", who)
            return
        try:
            number = self._journal.begin_snapshot(job.name)
        except LiveshiftError as error:
            self._fleet.journal.note(job.name, "not suspended", f"the job goes on: {error}", who)
            return
        self._last.add(job.name)
        snapshot = Snapshot(self._context, number, job, holders, suspends=f"{who} wants it")
        self._begin(snapshot)
        self._tasks.spawn(self._follow_last(snapshot, who))

    async def _follow_last(self, snapshot: Snapshot, who: str) -> None:
        await snapshot.run()
        self._end(snapshot)
        job = snapshot.job
        self._last.discard(job.name)
        self._states.pop(job.name, None)  # a resumed job gets a new one
        if snapshot.generation is not None:
            job.pause_s, job.unprotected = 0.0, ""
        elif job.state in ("running", "rewinding"):
            text = f"the job goes on: {words(snapshot.error)}"
            log.warning("%s is not suspended: %s", job.name, text)
            self._fleet.journal.note(job.name, "not suspended", text, who)

    def _switch_off(self, job: Job) -> None:
        """Let go of the snapshot of a job that is to have none any more: it would only grow older.
        The holders then learn from their claims that they need not keep it."""
        if job.newest is None:
            return
        try:
            self._journal.drop_snapshots(job.name)
        except LiveshiftError as error:  # the next look tries again
            log.error("%s of %s stays: %s", job.newest.name, job.name, error)
            return
        self._fleet.journal.note(
            job.name,
            "unprotected",
            f"not protected: {job.newest.name} is dropped, snapshots are off",
        )
        job.newest = None

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

    def _exposed(self, job: Job) -> str:
        return exposed(job, self._fleet.up(), self._fleet.cluster.domains)

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
        self._note_lost_order(snapshot.job)

    def _note_lost_order(self, job: Job) -> None:
        """Note that the job is not suspended, though an earlier orchestrator has begun to."""
        events = self._fleet.journal.events(job.name, 0)
        kinds = [e.kind for e in events if e.kind in ("suspending", "suspended", "not suspended")]
        if job.state == "running" and kinds[-1:] == ["suspending"]:
            text = "the job goes on: the orchestrator was restarted"
            self._fleet.journal.note(job.name, "not suspended", text)

    async def _follow(self, snapshot: Snapshot, state: _State, begun: float) -> None:
        job, cluster = snapshot.job, self._fleet.cluster
        measured = job.snapshots_auto(cluster) and job.snapshot_every(cluster) > 2 * TAKES_S
        slowness = Slowness(self._context, snapshot.name, next(iter(job.capsules.values())))
        if measured:
            await slowness.begin()
        await snapshot.run()
        self._end(snapshot)
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
            every = job.snapshot_every(cluster)
            rested = time.monotonic() + REST * snapshot.pause_s
            state.failures, state.failed, state.due = 0, "", max(begun + every, rested)
            state.avoid.clear()
            hosts = ", ".join(holders_of(job))
            text = f"a snapshot every {protection_row.seconds(every)}, held by {hosts}"
            # An interval that was chosen changes a little with each snapshot.
            state.notes.protected(text, hosts if job.snapshots_auto(cluster) else text)
            if measured:
                self._tasks.spawn(self._measure(slowness, snapshot, state, begun))
        elif snapshot.abandoned:
            job.unprotected = str(snapshot.error)  # due again as soon as nothing hinders it
        elif job.state == "running":
            state.avoid |= snapshot.refused
            self._failed(state, words(snapshot.error), snapshot.name)

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
        state.due = begun + job.snapshot_every(self._fleet.cluster)
        log.info("%s of %s: slowed it down by %.2f s besides the pause", name, job.name, seconds)

    def _failed(self, state: _State, why: str, name: str) -> None:
        """Wait for the next attempt, and note why there was none or why ``name`` failed."""
        every = state.job.snapshot_every(self._fleet.cluster)
        wait = min(every, RETRY_S) * 2**state.failures
        state.due = time.monotonic() + min(wait, max(every, AT_MOST_S))
        state.failures = min(state.failures + 1, 30)
        state.job.unprotected, before, state.failed = why, state.failed, why
        log.warning("%s: %s: %s", state.job.name, name or "no snapshot", why)
        if same(before) != same(why):
            state.notes.failed(why, name)


def _not_suspended(job: Job, why: str) -> Refused:
    return Refused(
        f"{job.name} cannot be suspended: {why}", hint=f"`liveshift status {job.name} -o wide`"
    )


def row(fleet: Fleet, job: Job) -> ProtectionRow | None:
    """What `status` shows of the job's snapshots."""
    return protection_row.row(job, fleet.cluster, fleet.views(), time.time())
