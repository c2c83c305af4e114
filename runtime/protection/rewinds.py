# SPDX-License-Identifier: Apache-2.0
"""Notices that a protected job has lost a host or a rank, and takes it back to its newest snapshot.

A job is *protected* here while it has a complete snapshot of all its capsules, and none of them has
ended. What dies of a fault is then no end of the job: :meth:`Rewinds.takes_back`. If no rewind is
possible yet (no holder is up, no host has room), nothing is ended, and the job waits. It goes on by
itself if the host comes back with its capsules.

losses/lookout.py says which hosts are lost, losses/command_ends.py which ends of commands are
the work of a fault. rewind_plans.py says where a job could go, and snapshot/rewind.py has the
steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Coroutine

from ...errors import LiveshiftError, Refused
from .. import messages
from ..daemon.faultpoints import reached
from ..daemon.tasks import Tasks
from ..fleet.address_book import AddressBook
from ..fleet.agents import Agents
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..journal.snapshot_tables import RewindKind, RewindRow
from ..losses.command_ends import CommandEnds
from ..losses.fencing import Fencing
from ..losses.lookout import Lookout
from ..migration.beside_rewinds import not_waiting
from ..migration.migration_records import write_rewound
from ..model.jobs import KILLED, Capsule, Job
from ..model.steps import MigrationStep
from ..moves.context import OrchestratorContext
from ..quiesce.gates import Gates
from ..snapshot.images_gone import images_gone, look_limit
from ..snapshot.on_rewind import RewindCommands
from ..snapshot.orders import cannot, check_lost
from ..snapshot.protection_notes import none_heard
from ..snapshot.rewind import Rewind, RewindEnd
from .rewind_plans import RewindPlans

log = logging.getLogger("liveshift.rewinds")

UNDER_WAY = {kind.under_way for kind in RewindKind}
"""The kinds of the events that say how far a rewind is, or what it waits for."""


class Rewinds:
    """All rewinds of the cluster; it implements RewindContext. ``gates`` are those of the
    migrations, too."""

    def __init__(
        self,
        fleet: Fleet,
        agents: Agents,
        address_book: AddressBook,
        context: OrchestratorContext,
        gates: Gates,
        endings: Endings,
    ) -> None:
        self.cluster = fleet.cluster
        self._fleet = fleet
        self._gates = gates
        self._endings = endings
        self._protection = fleet.journal.snapshots
        # RewindContext says what each of these does.
        self.request = agents.request
        self.is_up = fleet.is_up
        self.another_host = fleet.another_host
        self.publish = address_book.publish
        self.commit = context.commit
        self.may_have_run = fleet.journal.snapshots.may_have_run
        self._rows: dict[str, RewindRow] = {}  # by job: its last rewind, until that is done
        self._following: set[str] = set()  # jobs on which a task works
        self._noted: dict[str, str] = {}  # by job: why it waits
        self._wake = asyncio.Event()
        self._tasks = Tasks()
        self._commands = RewindCommands(fleet.cluster, fleet.journal)
        self._lookout = lookout = Lookout(
            fleet.cluster,
            fleet.heard,
            fleet.paused,
            gates.opened,
            fleet.locked,
            self._wake.set,
            agents.request,
            fleet.left_hosts,
        )
        self._plans = plans = RewindPlans(fleet, agents, lookout)
        self.protected = plans.protected
        self._fencing = Fencing(plans)
        self._ends = CommandEnds(fleet.cluster, lookout, self._protection, self.note)
        self.note_heartbeat = lookout.note_heartbeat
        self.note_device_errors = lookout.note_device_errors
        self.lacks = lookout.lacks
        self.why_again = lookout.why

    # ---- what the orchestrator reports ---------------------------------------------------------

    def takes_back(self, job: Job, capsule: Capsule, end: messages.CapsuleEnded) -> bool:
        """Whether the end of a capsule's command is not recorded now, as it may be the work of a
        fault. Its agent then reports it again with every heartbeat, until it is known."""
        if not self.protected(job) or not self._ends.take_back(job, capsule, end):
            return False
        if self.why_again(job):
            self._cancel_moves(job)
        return True

    def _cancel_moves(self, job: Job) -> None:
        for migration in self._fleet.moves_of(job):
            # While a capsule freezes, its source says what became of it.
            if migration.step is not MigrationStep.FREEZING:
                with contextlib.suppress(Refused):  # it is over, or too far to cancel
                    migration.cancel("the end of a rank of its job")

    def order(self, who: str, job: Job, lost: str, *, dry_run: bool) -> messages.RewindOrdered:
        """Rewind a job because a person wants it, who also vouches that the host ``lost`` is dead;
        "" for none. Raises Refused or NotFound, and changes nothing then, nor if ``dry_run``."""
        waits = self._rows.get(job.name)
        hosts = {capsule.host for capsule in job.capsules.values()}
        if lost and waits is not None:
            hosts |= set(waits.before)
        if lost:
            check_lost(job, lost, hosts, self._lookout.answers)
        generation = job.newest
        if generation is None or not self.protected(job):
            raise cannot(job, "it has no complete snapshot" if job.state == "running" else "")
        away = self._plans.away(job, {lost})
        # With no host lost, the person can wait for a move, or cancel it.
        moves = self._fleet.moves_of(job)
        if moving := self._plans.going_on(job, away) if lost else not_waiting(moves):
            name = moving[0].name
            raise cannot(job, f"{name} is under way", f"`liveshift cancel {name}`")
        if not lost and job.state == "rewinding":
            raise cannot(job, "it is being rewound", f"`liveshift events {job.name}`")
        if not lost and not any(map(self.is_up, hosts)):
            silent = ", ".join(sorted(hosts))
            hint = "--lost HOST says that you know one of them to be dead"
            raise cannot(job, f"none of its hosts is heard ({silent}): it may train there", hint)
        plan = self._plans.plan(job, generation, away)
        if isinstance(plan, str):
            raise cannot(job, plan)
        within = 0.0 if lost else look_limit(self.cluster, generation)
        if not dry_run:
            what = f"{who} says that {lost} is dead" if lost else f"{who} wants it"
            self.note(job, "rewinding", f"ordered: {what}")
            if lost:
                self._lookout.vouch(job, lost, who)
            else:
                self._lookout.order(job, f"{who} wants it", within)
        where = {name: place.host for name, place in plan.items()}
        ago, boundary = max(0.0, time.time() - generation.time), generation.boundary
        return messages.RewindOrdered(job.name, generation.name, boundary, ago, where, within)

    def resume(self, job: Job, row: RewindRow, before: Collection[str]) -> None:
        """Carry out the resumption of a suspended job. The journal has it already. The hosts
        ``before`` may still have copies of the job."""
        assert job.newest is not None
        self._enter(job, row)
        rewind = Rewind(self, job, job.newest, row, before)
        self._spawn(job, self._carry_out(job, rewind))

    def host_lost(self, host: str, job: Job, capsule: Capsule) -> bool:
        """Take it that a host does not have a capsule which it was let run. Returns False if the
        job cannot be rewound: then the capsule has ended."""
        if not self.protected(job):
            return False
        self.lacks(capsule, f"{host} came back without {capsule.name}")
        return True

    def under_way(self) -> bool:
        rewinding = any(job.state == "rewinding" for job in self._fleet.jobs.values())
        return rewinding or self._commands.busy or self._fencing.busy

    # ---- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        for row, _ in self._protection.rewinds_under_way():
            self._rows[row.job] = row
        self._commands.recover()
        while True:
            for job in list(self._fleet.jobs.values()):
                if job.name not in self._following:
                    try:
                        self._look_at(job)
                    except LiveshiftError as error:  # a full disk, say: the next look tries again
                        self._wait(job, str(error))
            before = {host for row in self._rows.values() for host in row.before}
            self._lookout.watch(filter(self.protected, self._fleet.jobs.values()), before)
            for job in self._fleet.jobs.values():
                self._note_silence(job)
                with contextlib.suppress(LiveshiftError):  # the next look tries again
                    self._fencing.look(job)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.cluster.timeouts.heartbeat / 2):
                    await self._wake.wait()

    def _look_at(self, job: Job) -> None:
        if job.state == "rewinding":
            self._spawn(job, self._follow(job))
            return
        if job.name in self._rows:
            if job.state == "ending":
                self._end_unrestored(job)
            del self._rows[job.name]
        if not self.protected(job):
            self._end_lacking(job)
            if all(self.is_up(capsule.host) for capsule in job.capsules.values()):
                job.rewinding = ""
        elif not self._plans.going_on(job):
            if self.why_again(job):
                self._spawn(job, self._follow(job))
            elif waits := self._lookout.links(job).waits:
                self._wait(job, waits)
            else:
                self._noted.pop(job.name, None)
                job.rewinding = ""

    def _spawn(self, job: Job, work: Coroutine[None, None, None]) -> None:
        self._following.add(job.name)
        self._tasks.spawn(self._guarded(job, work))

    async def _follow(self, job: Job) -> None:
        if self.why_again(job):
            await self._begin(job)
        elif job.state == "rewinding":  # else what was lost has come back meanwhile
            await self._go_on(job)

    async def _guarded(self, job: Job, work: Coroutine[None, None, None]) -> None:
        """Do work on a job; the loop leaves the job alone meanwhile. If the work fails, the loop
        tries again."""
        try:
            await work
        except Exception as error:  # the next attempt comes with the loop
            if not isinstance(error, LiveshiftError):
                log.exception("%s: an internal error in its rewind", job.name)
            self._wait(job, str(error))
            await asyncio.sleep(self.cluster.timeouts.heartbeat)
        finally:
            self._following.discard(job.name)

    # ---- a rewind ------------------------------------------------------------------------------

    async def _begin(self, job: Job) -> None:
        """Plan a rewind, see that the images are there, write it, and carry it out."""
        generation, lost = job.newest, self._lookout.lost(job)
        died = {c: at for c, m in self._lookout.lacking(job).items() if (at := m.died) is not None}
        if generation is None:
            self._give_up(job, "no snapshot of it is left")
            return
        if over := next((c.name for c in job.capsules.values() if c.code is not None), ""):
            self._give_up(job, f"{over} has ended")
            return
        why, owners = self.why_again(job), job.owners
        plan = self._plans.plan(job, generation, lost)
        if isinstance(plan, str):
            cut = self._lookout.links(job).why
            text = f"{cut}, and {plan}" if cut else plan
            raise LiveshiftError(text + self._plans.offer(job, generation))
        # A job that has lost a host or a rank has nothing to lose, and does not wait.
        trains = job.state == "running" and not self._lookout.silent(job)
        trains = trains and not self._lookout.lacking(job)
        gone = await images_gone(self, job, generation, plan, trains=trains)
        if job.newest is not generation or not self.protected(job):
            return  # a later snapshot is complete, so the holders may have dropped this one
        last, kind = self._rows.get(job.name), RewindKind.REWIND
        if job.state == "rewinding" and last and last.kind is RewindKind.RESUMPTION:
            kind = last.kind  # a host was lost while the job was being resumed
            if gone:
                self._suspend_again(job, last, gone)
                return
        if gone:
            self._plans.gone.add(generation.number)
            self._give_up(job, gone)
            return
        again = self._plans.plan(job, generation, self._lookout.lost(job))
        if again != plan or job.newest is not generation or not self.why_again(job):
            return  # something has changed meanwhile: look again
        if not self.protected(job) or self._plans.going_on(job) or job.owners != owners:
            return
        noticed, links = self._lookout.unnoticed(job), self._lookout.links(job)
        where = {c: place.host for c, place in plan.items()}
        hosts = {owners[capsule] for capsule in lost}
        # Several ranks may die of one fault. What a person orders is none.
        faulty = set(hosts) or {owners[capsule] for capsule in list(died)[:1]}
        if job.state == "rewinding" and last:
            hosts.update(last.lost)
        back = LiveshiftError(f"{job.name} goes back to {generation.name}: {why}")
        moves = self._fleet.moves_of(job)
        with self._fleet.journal.together():
            row = self._protection.rewind(
                job.name, generation.number, where, why, died, kind, hosts
            )
            write_rewound(self._fleet.journal, moves, back)
        self._fleet.failures.lost(faulty)
        self._enter(job, row)
        for move in moves:  # with no await since the write: none of them does anything after it
            move.overtake(back)
        self.note(job, row.kind.under_way, f"goes back to {generation.name}: {why}")
        log.warning("%s goes back to %s: %s", job.name, generation.name, why)
        self._fleet.left_hosts.note(links.leaves, links.pairs)
        await reached("rewind.committed")
        before = {*owners.values(), *(h for m in moves for h in (m.source, m.destination))}
        await self._carry_out(job, Rewind(self, job, generation, row, before, noticed))

    async def _carry_out(self, job: Job, rewind: Rewind) -> None:
        self._ended(job, rewind, await rewind.run())

    async def _go_on(self, job: Job) -> None:
        """Go on with the rewind that an earlier orchestrator has left, or that had to wait."""
        row, generation = self._rows.get(job.name), job.newest
        if row is None or generation is None or generation.number != row.generation:
            self._give_up(job, "the journal was put back, and does not know the snapshot any more")
            return
        rewind = Rewind(self, job, generation, row, row.before)
        self._ended(job, rewind, await rewind.recover())

    def _enter(self, job: Job, row: RewindRow) -> None:
        """Bring the memory to what the journal says since the write."""
        if (snapshot := self._fleet.snapshots.get(job.name)) is not None:
            snapshot.abandon("the job is rewound")
        job.enter(row.owners, row.rewinds, "rewinding")
        for capsule in job.capsules.values():
            self._lookout.begin_anew(capsule)
        self._rows[job.name] = row
        self._noted.pop(job.name, None)

    def _ended(self, job: Job, rewind: Rewind, end: RewindEnd) -> None:
        self._commands.run_due()
        if end is RewindEnd.LOST and rewind.row.kind is RewindKind.RESUMPTION:
            self._suspend_again(job, rewind.row, str(rewind.error))
        elif end is RewindEnd.LOST:
            self._give_up(job, str(rewind.error))
        elif end is RewindEnd.JOB_ENDS:
            self._end_unrestored(job)

    def _suspend_again(self, job: Job, resumption: RewindRow, why: str) -> None:
        """Suspend a job that could not be resumed. A later resumption may use other hosts."""
        row = self._protection.suspend_again(resumption, why)
        job.enter(row.owners, row.rewinds, "suspended")
        job.rewinding = ""
        self._rows.pop(job.name, None)
        self.note(job, "not resumed", f"is suspended again: {why}")

    # ---- jobs that cannot be rewound -----------------------------------------------------------

    def _give_up(self, job: Job, why: str) -> None:
        """End what is certainly lost. A capsule whose host is only silent may still come back."""
        self._note_once(job, f"cannot be taken back: {why}")
        lacking = self._lookout.lacking(job)
        for capsule in list(job.capsules.values()):
            runs_nowhere = not (capsule.granted or capsule.migration)  # a move may still bring it
            if capsule.code is None and (capsule.name in lacking or runs_nowhere):
                lack = lacking.get(capsule.name)
                self._endings.capsule_ended(job, capsule, lack.code if lack else KILLED)
                self.note(job, "lost", f"{capsule.name} is lost: {why}")
        if job.state == "rewinding" and not self.why_again(job):  # all of it runs
            self._fleet.journal.set_job(job.name, "running", job.code)
            job.state = "running"

    def _end_unrestored(self, job: Job) -> None:
        """End the capsules of a job that is being ended which run nowhere: no signal reaches them,
        and from now on each of their claims is ruled "end"."""
        for capsule in list(job.capsules.values()):
            if capsule.code is None and not capsule.granted and not capsule.migration:
                self._endings.capsule_ended(job, capsule, KILLED)

    def _end_lacking(self, job: Job) -> None:
        """End the capsules of a job that is not taken back any more which were lost while it could
        be: only what is known of them here says so, and no host reports them again."""
        for name, lack in self._lookout.lacking(job).items():
            capsule = job.capsules[name]
            if capsule.code is None and not capsule.migration:
                self._endings.capsule_ended(job, capsule, lack.code)
                self.note(job, "lost", f"{name} is lost: {lack.why}")

    def _wait(self, job: Job, why: str) -> None:
        """Note why a job is not taken back yet."""
        self._note_once(job, f"waits: {why}")

    def _note_once(self, job: Job, text: str) -> None:
        """Note each text once in a row; `status` says it as long as it is the last one."""
        job.rewinding = text
        if self._noted.get(job.name) != text:
            self._noted[job.name] = text
            log.warning("%s: %s", job.name, text)
            self.note(job, "rewinding", text)

    def _note_silence(self, job: Job) -> None:
        """Say once per silence what a person can do for a job that is not taken back by itself, as
        none of its hosts is heard; `status` says it as long as it lasts."""
        hosts = self._lookout.perhaps_dead(job) if job.state == "running" else {}
        snapshots = self.cluster.snapshots
        fence_after = snapshots.fence_after if snapshots.fence else None
        text = none_heard(job.name, hosts, fence_after) if hosts else ""
        before, job.silent = job.silent, text
        if job.silent and not before:
            log.warning("%s: %s", job.name, job.silent)
            self.note(job, "silent", job.silent)

    # ---- the rest of RewindContext -------------------------------------------------------------

    def before(self, job: Job) -> list[str]:
        """One host that a person calls dead is enough, as is one that has ended its copy: the job
        ran as a whole on all of these hosts, so a part of it has ended, and the others can end at
        most the collective in which they are. A dead host that is none of them proves nothing.
        """
        before = self._protection.before(job.name)
        return before if self._lookout.vouched(job).keys().isdisjoint(before) else []

    def note(self, job: Job, kind: str, text: str) -> None:
        self._fleet.journal.note(job.name, kind, text)
        if kind in UNDER_WAY:
            job.rewinding = text

    def begin_restoring(self, row: RewindRow) -> None:
        self._protection.begin_restoring(row.number)

    def end_rewind(self, row: RewindRow) -> None:
        job = self._fleet.jobs.get(row.job)
        self._commands.end_rewind(row, job.newest if job else None)
        self._rows.pop(row.job, None)
        if job is not None and job.state == "rewinding":
            job.state, job.rewinding = "running", ""
            job.last_rewind = self._fleet.journal.snapshots.last_rewind(row.job)

    async def open_gates(self, job: Job) -> str:
        return await self._gates.open(job, self.cluster.timeouts)
