# SPDX-License-Identifier: Apache-2.0
"""The snapshots that people order: the last one of a job that is suspended, and one that is saved
in a directory while the job trains on.

An order is carried out as soon as nothing hinders it, and the job's history says what came of it.
It waits for the moves of the job. A move that begins while its snapshot is taken goes first: the
snapshot is given up, and taken again after the move. Any other failure ends the order. Until its
snapshot begins, the person who gave the order can take it back.

An order is not in the journal: an orchestrator that is restarted says that the order is void.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ... import units
from ...errors import LiveshiftError, Refused
from ..daemon.tasks import Tasks
from ..fleet.fleet import Fleet
from ..messages import SnapshotOrdered, SuspensionOrdered
from ..model.jobs import Job
from ..snapshot.directory_images import DirectoryImages
from ..snapshot.protection_notes import words
from ..snapshot.snapshot import Snapshot
from .job_snapshots import Chosen, JobSnapshots

log = logging.getLogger("liveshift.protection")

TICK_S = 0.1
MOVES_SHOWN = 3
"""The history names so many of the moves that an order waits for."""


@dataclass(frozen=True)
class _Order:
    """``who`` wants a snapshot of ``job``, which ``suspends`` the job or not, and is to be saved in
    the directory ``to``; "" if it stays in memory."""

    job: Job
    who: str
    to: str
    suspends: bool

    @property
    def begun(self) -> str:
        """The kind of the events that say how far it is."""
        return "suspending" if self.suspends else "saving"

    @property
    def failed(self) -> str:
        """The kind of the event that says that it has failed."""
        return "not suspended" if self.suspends else "not saved"


class OrderedSnapshots:
    """The orchestrator has one instance. It keeps the orders for snapshots in memory, at most one
    for each job. Its task ``run`` looks every TICK_S seconds for orders that can begin. The history
    of the job says how an order ended."""

    def __init__(self, fleet: Fleet, snapshots: JobSnapshots, images: DirectoryImages) -> None:
        self._fleet = fleet
        self._snapshots = snapshots
        self._images = images
        self._orders: dict[str, _Order] = {}  # by job; those that have not begun
        self._under_way: set[str] = set()  # jobs whose ordered snapshot is being taken or saved
        self._tasks = Tasks()

    def recover(self) -> None:
        """Note which orders an earlier orchestrator has not carried out."""
        for job in self._fleet.jobs.values():
            kinds = [event.kind for event in self._fleet.journal.events(job.name, 0)]
            self._tasks.spawn(self._note_lost(job, kinds))

    # ---- what people order ---------------------------------------------------------------------

    def suspend(self, who: str, job: Job, to: str, *, dry_run: bool) -> SuspensionOrdered:
        """Order that the job's next snapshot suspends the job. ``to``: see RewindRow. Raises
        Refused."""
        holders = self._check(job, "suspended", to, suspends=True)
        moves = self._snapshots.moves(job)
        if not dry_run:
            text = "a last snapshot is taken, then it ends everywhere"
            if to:
                text += f", and is saved in {to}"
            self._order(_Order(job, who, to, suspends=True), "suspended", text)
        return SuspensionOrdered(job.name, holders, moves)

    def save(self, who: str, job: Job, to: str, *, dry_run: bool) -> SnapshotOrdered:
        """Order a snapshot that is saved in the directory ``to``. The job trains on. Raises
        Refused."""
        if job.state != "running":
            hint = f"`liveshift suspend {job.name} --to {to}`" if job.state == "suspended" else ""
            raise _cannot(job, "saved", f"it is {job.state}", hint)
        holders = self._check(job, "saved", to, suspends=False)
        moves = self._snapshots.moves(job)
        if not dry_run:
            text = f"a snapshot is taken, and saved in {to}"
            self._order(_Order(job, who, to, suspends=False), "saved", text)
        return SnapshotOrdered(job.name, holders, moves)

    def withdraw(self, who: str, job: Job) -> bool:
        """Take back the order that ``who`` gave for the job, and return whether that was possible:
        not once its snapshot has begun."""
        order = self._orders.get(job.name)
        if order is None or order.job is not job or order.who != who:
            return False
        self._failed(order, f"{who} took the order back")
        return True

    def _check(self, job: Job, what: str, to: str, *, suspends: bool) -> dict[str, str]:
        """The hosts that would hold the images; none are chosen before the job's moves are over.
        Raises Refused if no snapshot is possible now, nor after these moves."""
        if self._snapshots.moves(job):
            if ended := self._snapshots.ended(job):
                raise _cannot(job, what, ended)
            return {}
        if hindrance := self._snapshots.hindrance(job):
            raise _cannot(job, what, hindrance)
        holders = self._holders(job, to, suspends=suspends)
        if isinstance(holders, str):
            raise _cannot(job, what, holders)
        return holders

    def _holders(self, job: Job, to: str, *, suspends: bool) -> Chosen:
        """The hosts that would hold the images now. What goes on into a directory may lie on the
        hosts of its capsules alone, unless a better snapshot of a job that trains on would have to
        go for it."""
        better = job.newest if not suspends and self._snapshots.withstands(job) else None
        alone = bool(to) and better is None
        holders = self._snapshots.holders(job, ordered=True, alone=alone)
        if to and better is not None and isinstance(holders, str):
            holders += (
                "; the job's own hosts could, but they would have to drop"
                f" {better.name}, which protects the job"
            )
        return holders

    def _order(self, order: _Order, what: str, text: str) -> None:
        """Enter the order, and note ``text``: what is to be done."""
        job = order.job
        waits = self._orders.get(job.name)
        if (waits is not None and waits.job is job) or job.name in self._under_way:
            raise _cannot(job, what, "an ordered snapshot of it is under way already")
        self._enter(order)
        moves = self._snapshots.moves(job)
        if moves:
            text = f"waits for the end of {units.some(moves, MOVES_SHOWN)}; then {text}"
        self._fleet.journal.note(job.name, order.begun, text, order.who)

    def _enter(self, order: _Order) -> None:
        self._orders[order.job.name] = order
        self._snapshots.ordered.add(order.job.name)

    # ---- carried out ---------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            for order in list(self._orders.values()):
                gone = self._fleet.jobs.get(order.job.name) is not order.job
                if gone or order.job.state == "ended":
                    self._failed(order, "the job has ended")
                elif order.job.state == "running" and self._free(order.job):
                    self._begin(order)
            await asyncio.sleep(TICK_S)

    def _free(self, job: Job) -> bool:
        return (
            job.name not in self._fleet.snapshots
            and job.name not in self._images.busy
            and not self._snapshots.moves(job)
        )

    def _done(self, order: _Order) -> None:
        self._orders.pop(order.job.name, None)
        self._snapshots.ordered.discard(order.job.name)

    def _begin(self, order: _Order) -> None:
        job = order.job
        holders = self._holders(job, order.to, suspends=order.suspends)
        why = self._snapshots.hindrance(job) or (holders if isinstance(holders, str) else "")
        if why or isinstance(holders, str):
            self._failed(order, why)
            return
        suspends, to = (f"{order.who} wants it", order.to) if order.suspends else ("", "")
        try:
            snapshot = self._snapshots.begin(job, holders, suspends=suspends, to=to, ordered=True)
        except LiveshiftError as error:
            self._failed(order, words(error))
            return
        self._done(order)
        self._under_way.add(job.name)

        async def follow() -> None:
            try:
                await snapshot.run()
                self._snapshots.end(snapshot)
                if snapshot.generation is None:
                    if snapshot.gave_way and job.state == "running":
                        self._try_again(order, snapshot)
                    elif not order.suspends or job.state != "ended":
                        self._failed(order, words(snapshot.error))
                    return
                job.pause_s, job.unprotected = 0.0 if order.suspends else snapshot.pause_s, ""
                if not order.suspends:
                    await self._save(order, snapshot.pause_s)
            except Exception as error:  # the command that ordered it waits for an end
                log.exception("%s: an internal error", snapshot.name)
                self._failed(order, f"an internal error: {error}")
            finally:
                self._under_way.discard(job.name)

        self._tasks.spawn(follow())

    def _try_again(self, order: _Order, snapshot: Snapshot) -> None:
        """Let an order wait again whose snapshot a move has ended."""
        self._enter(order)
        moves = units.some(self._snapshots.moves(order.job), MOVES_SHOWN) or "the move"
        text = f"{words(snapshot.error)}; it is tried again after the end of {moves}"
        self._fleet.journal.note(order.job.name, order.begun, text, order.who)

    async def _save(self, order: _Order, pause_s: float) -> None:
        """Save the newest snapshot of a job. No other one is taken meanwhile, so its holders keep
        it."""
        job, to, journal = order.job, order.to, self._fleet.journal
        generation = job.newest
        assert generation is not None
        self._images.busy[job.name] = f"{generation.name} is being saved in {to}"
        try:
            size = await self._images.save(job, generation, to)
            text = (
                f"{generation.name} is in {to}: {units.size(size)} on the disk,"
                f" {generation.boundary}; the job was paused for {pause_s:.2f} s"
            )
            journal.snapshots.note_saved(job.name, generation.name, to, generation.time)
            journal.note(job.name, "saved", text, order.who)
            self._drop_alone(job)
        except LiveshiftError as error:
            self._failed(order, str(error))
        finally:
            self._images.busy.pop(job.name, None)

    def _drop_alone(self, job: Job) -> None:
        """Give the snapshot's memory back if it lies on the hosts of its capsules alone: it would
        only grow older there, since no next one takes its place."""
        newest = job.newest
        if newest is not None and any(
            holders == [newest.owners[name][0]] for name, holders in newest.holders.items()
        ):
            self._fleet.journal.snapshots.drop_snapshots(job.name)
            job.newest = None

    def _failed(self, order: _Order, why: str) -> None:
        self._done(order)
        text = f"the job goes on: {why}" if order.job.state != "ended" else why
        log.warning("%s is %s: %s", order.job.name, order.failed, text)
        self._fleet.journal.note(order.job.name, order.failed, text, order.who)

    async def _note_lost(self, job: Job, kinds: list[str]) -> None:
        """Note that an order for the job is void (perhaps one to resume it), if the last of
        ``kinds`` in its history say that an earlier orchestrator has begun with it."""
        while job.taking:  # what was left of its snapshot is being undone
            await asyncio.sleep(TICK_S)
        goes_on = job.state in ("running", "rewinding")
        text = "the orchestrator was restarted"
        if goes_on:
            text = f"the job goes on: {text}"
        for begun, done, void in (
            ("suspending", "suspended", goes_on),
            ("saving", "saved", True),
            # From a directory: the hosts that were loading its images drop them again.
            ("resuming", "resumed", job.state == "suspended"),
        ):
            failed = f"not {done}"
            last = [kind for kind in kinds if kind in (begun, done, failed)][-1:]
            if last == [begun] and void:
                stays = "stays suspended: " if done == "resumed" else ""
                self._fleet.journal.note(job.name, failed, stays + text)


def _cannot(job: Job, what: str, why: str, hint: str = "") -> Refused:
    return Refused(
        f"{job.name} cannot be {what}: {why}", hint=hint or f"`liveshift status {job.name} -o wide`"
    )
