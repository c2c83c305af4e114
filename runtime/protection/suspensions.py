# SPDX-License-Identifier: Apache-2.0
"""Suspends jobs and resumes them, because a person wants it.

A suspended job runs nowhere and takes no slot: its newest snapshot, in the memory of other hosts,
is all that there is of it. A person orders that snapshot (ordered_snapshots.py); its durable write
also says that the job is suspended (snapshot/snapshot.py). From then on every copy of the job
counts as an earlier one. They end here, on each host that is up; another host ends its own when it
returns, as the address book tells it to.

Each image goes on to a second host, so that any one of them may die (second_copies.py). The images
may be saved in a directory that all hosts see; then no host needs to keep them. A host
that resumes a capsule of such a job loads its image first, and then holds it as any other
(saved_jobs.py).

The resumption is written and carried out as a rewind in which no capsule is in place. If it fails
for good, the job is suspended again, and nothing of it is lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Collection, Mapping

from ... import units
from ...errors import LiveshiftError, NotFound, Refused, Unreachable
from .. import messages
from ..daemon.tasks import Tasks
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..journal.snapshot_tables import RewindKind, RewindRow
from ..model.jobs import KILLED, Job
from ..model.rewind_places import Place, rewind_plan
from ..model.snapshots import Generation, image_name
from ..snapshot.directory_images import Found
from ..snapshot.earlier_copies import EarlierCopies
from ..snapshot.protection_notes import offer
from ..snapshot.protection_row import Holders, holders_of, reachable
from ..snapshot.shared_files import cut_back_what_ran_on
from .ordered_snapshots import OrderedSnapshots
from .rewinds import Rewinds
from .saved_jobs import SavedJobs
from .second_copies import SecondCopies

log = logging.getLogger("liveshift.suspensions")

TICK_S = 0.1


class _Over(LiveshiftError):
    """The job is not suspended any more."""


class Suspensions:
    """The orchestrator has one instance, which suspends and resumes jobs. Its task ``run`` ends the
    copies of each job that the journal calls suspended, and then says so in the job's history. It
    also ends the suspended jobs that a person stops."""

    def __init__(
        self,
        fleet: Fleet,
        ordered: OrderedSnapshots,
        rewinds: Rewinds,
        endings: Endings,
        saved: SavedJobs,
    ) -> None:
        self._fleet = fleet
        self._ordered = ordered
        self._rewinds = rewinds
        self._endings = endings
        self._saved = saved
        self._second = SecondCopies(fleet, rewinds, saved.busy)
        self._tables = fleet.journal.snapshots
        self._rows: dict[str, RewindRow] = {}  # by job: its suspension
        self._clear: set[int] = set()  # suspensions, by number, whose jobs have no copy left
        self._busy: set[str] = set()  # jobs whose copies are being ended
        self._saving: set[str] = set()  # jobs whose images are being saved
        self._tasks = Tasks()

    # ---- what people ask for -------------------------------------------------------------------

    def suspend(
        self, who: str, job: Job, *, to: str = "", dry_run: bool
    ) -> messages.SuspensionOrdered:
        """Order the suspension of a job; its history says what came of it. If ``to`` names a
        directory, the images are saved there then. Raises Refused."""
        if job.state == "suspended" and to and job.newest is not None:
            held = {name: hosts[0] for name, hosts in job.newest.holders.items() if hosts}
            if held.keys() != job.capsules.keys():
                raise _cannot(job, "saved", f"it is in {job.newest.directory} already", "")
            self._saved.check_free(job, "saved")
            if not dry_run:
                # Written first: a restarted orchestrator saves them, and says nothing before that.
                self._rows[job.name] = self._tables.save_to(job.name, to)
                self._begin_saving(job, to)
            return messages.SuspensionOrdered(job.name, held)
        if job.state != "running":
            raise _cannot(job, "suspended", f"it is {job.state}", "")
        return self._ordered.suspend(who, job, to, dry_run=dry_run)

    async def resume(
        self, who: str, job: Job, *, source: str = "", snapshot: str = "", dry_run: bool
    ) -> messages.ResumptionOrdered:
        """Let a suspended job go on. ``source`` names the directory of its images; with "" they are
        taken from where they were put. ``snapshot``: the name of the one that the person expects
        there, or "". Raises Refused or NotFound; then the job stays suspended."""
        _check_suspended(job)
        generation, names = job.newest, dict.fromkeys(job.capsules, "")
        if generation is None:
            raise _cannot(
                job, "resumed", "no snapshot of it is left", f"`liveshift stop {job.name}`"
            )
        if snapshot not in ("", generation.saved_name):
            hint = f"`liveshift stop {job.name}` gives that one up; then you can take {snapshot}"
            why = f"it is suspended at {generation.saved_name}, not at {snapshot}"
            raise _cannot(job, "resumed", why, hint)
        up = self._fleet.up()
        here = reachable(job, Holders.of(self._fleet.views()))
        directory = source or ("" if all(here.values()) else generation.directory)
        self._saved.check_free(job, "resumed")
        found = await self._saved.find(job, directory) if directory else None
        _check_suspended(job, generation)
        # From a directory any host can take an image.
        there = dict.fromkeys(names, up) if directory else {}
        plan = self._plan(job, generation, there)
        if not dry_run and found is None:
            plan = await self._checked(job, generation, plan)
        where = {name: place.host for name, place in plan.items()}
        seconds = max(0.0, time.time() - generation.time)
        ordered = messages.ResumptionOrdered(
            job.name, generation.name, generation.boundary, seconds, where
        )
        if dry_run:
            return ordered
        why, text = f"{who} wants it", ", ".join(f"{c} on {host}" for c, host in where.items())
        if found is not None:
            load = self._load(job, generation, where, found, directory, why)
            self._saved.begin(job, "loaded", load)
            self._note_resuming(job, f"{generation.name} in {directory}: {text}", who)
            return ordered
        self._let_go_on(job, generation, where, why)
        self._note_resuming(job, f"{generation.name}: {text}", who)
        return ordered

    def _plan(
        self,
        job: Job,
        generation: Generation,
        there: Mapping[str, list[str]],
        gone: Collection[tuple[str, str]] = (),
    ) -> dict[str, Place]:
        """Where the capsules go. ``there``: who gives each image; by default the holders that can,
        but for the pairs of capsule and holder in ``gone``. Raises Refused."""
        names = dict.fromkeys(job.capsules, "")
        found = dict(there)
        for name, hosts in reachable(job, Holders.of(self._fleet.views())).items():
            held = generation.holders.get(name, [])
            giving = [host for host in hosts if (name, host) not in gone]
            # If none can give it, the reason names those that may have it once they are up.
            found.setdefault(name, giving or self._away(held) or held)
        images = dataclasses.replace(generation, holders=found)
        last = self._fleet.left_hosts.recent()
        plan = rewind_plan(self._fleet.views(), images, names, names, last=last)
        if isinstance(plan, str):
            raise _cannot(job, "resumed", plan, "it stays suspended until then")
        return plan

    async def _checked(
        self, job: Job, generation: Generation, plan: dict[str, Place]
    ) -> dict[str, Place]:
        """The plan, or the one that has taken its place, once all its holders have said that they
        have the images. Meanwhile a host may die, or another job take a slot. Raises as
        :meth:`resume`."""
        asked: set[tuple[str, str]] = set()
        gone: set[tuple[str, str]] = set()
        while True:
            for name, place in plan.items():
                if (name, place.holder) in asked:
                    continue
                try:
                    await self._check_held(job, generation, name, place.holder)
                except Unreachable:
                    if self._fleet.is_up(place.holder):
                        raise
                    break  # another holder may have the image as well
                except Refused:
                    gone.add((name, place.holder))
                    held = generation.holders.get(name, [])
                    giving = reachable(job, Holders.of(self._fleet.views()))[name]
                    if not self._away(held) and all((name, host) in gone for host in giving):
                        raise
                    break  # another holder has it, or will once it is up
                asked.add((name, place.holder))
            self._saved.check_free(job, "resumed")  # they may be being saved since
            again = self._plan(job, generation, {}, gone)
            if again == plan:
                return plan
            plan = again

    def _away(self, hosts: Collection[str]) -> list[str]:
        return [host for host in hosts if not self._fleet.is_up(host)]

    async def _check_held(
        self, job: Job, generation: Generation, capsule: str, holder: str
    ) -> None:
        """Ask a holder for an image. Raises Refused if the holder does not have it any more, and
        what the request raises."""
        image, limit = _image(job, generation, capsule), self._fleet.cluster.timeouts.prepare
        try:
            await self._rewinds.request(holder, messages.GetHeld(image, capsule), limit)
        except NotFound as gone:
            saved = offer(self._tables.saved(job.name), job.name)
            raise _cannot(
                job,
                "resumed",
                f"{image}, the image of {capsule}, is gone: {gone}{saved}",
                f"`liveshift stop {job.name}` gives the job up",
            ) from gone

    def _note_resuming(self, job: Job, text: str, who: str) -> None:
        """Note that the job goes on; every such order has an end in the history."""
        self._fleet.journal.note(job.name, "resuming", f"goes on from {text}", who)

    def _let_go_on(self, job: Job, generation: Generation, where: dict[str, str], why: str) -> None:
        _check_suspended(job, generation)  # another request may have come first
        before = self._rows[job.name].owners.values() if job.name in self._rows else ()
        row = self._tables.resume(job.name, generation.number, where, why)
        self._rows.pop(job.name, None)
        self._second.forget(job.name)
        self._rewinds.resume(job, row, {host for host, _ in before})

    async def resume_saved(
        self, who: str, name: str, source: str, snapshot: str, *, dry_run: bool
    ) -> messages.ResumptionOrdered:
        """Let a job go on from a snapshot in the directory ``source`` that has ended, or that this
        orchestrator has never had. Raises as SavedJobs.adopt and :meth:`resume` do."""
        adopted = await self._saved.adopt(who, name, source, snapshot, dry_run=dry_run)
        if isinstance(adopted, messages.ResumptionOrdered):
            return adopted
        return await self.resume(who, adopted, dry_run=False)

    def _begin_saving(self, job: Job, to: str) -> None:
        self._saved.begin(job, "saved", self._save(job, to))
        self._saving.add(job.name)

    async def _save(self, job: Job, to: str) -> None:
        try:
            await self._saved.save(job, to)
            if job.state != "suspended":
                name = job.newest.name if job.newest else "its snapshot"
                text = f"{name} is in {to}, and the job was stopped meanwhile"
                self._fleet.journal.note(job.name, "saved", text)
        except Exception as error:  # the command that ordered it waits for an end
            if not isinstance(error, LiveshiftError):
                log.exception("%s: an internal error while it was saved", job.name)
            self._fleet.journal.note(job.name, "not saved", f"is not in {to}: {error}")
        finally:
            self._saving.discard(job.name)
        row = self._rows.get(job.name)
        if row is not None and row.number in self._clear:
            self._note_suspended(job)

    def _note_suspended(self, job: Job) -> None:
        """Note where a suspended job's images are, unless it has been stopped meanwhile."""
        if job.state == "suspended":
            self._fleet.journal.note(job.name, "suspended", _text(job))

    async def _load(
        self,
        job: Job,
        generation: Generation,
        where: dict[str, str],
        found: Found,
        directory: str,
        why: str,
    ) -> None:
        """Let the job's next hosts load its images, then let it go on there."""
        try:
            loaded = await self._saved.load(job, generation, where, found, directory)
            self._let_go_on(job, loaded, where, why)
        except LiveshiftError as error:
            self._fleet.journal.note(job.name, "not resumed", f"stays suspended: {error}")

    # ---- what follows --------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            for row, _ in self._tables.rewinds_under_way() if self._has_news() else ():
                if row.kind is RewindKind.SUSPENSION:
                    self._rows[row.job] = row
            for name, row in list(self._rows.items()):
                try:
                    self._look_at(self._fleet.jobs.get(name), row)
                except LiveshiftError as error:  # for example a full disk; the loop tries again
                    log.error("%s: %s", name, error)
            await asyncio.sleep(TICK_S)

    def _has_news(self) -> bool:
        """Whether the journal has a suspension that is not known here yet."""
        asleep = (job for job in self._fleet.jobs.values() if job.state in ("suspended", "ending"))
        return any(
            job.name not in self._rows or self._rows[job.name].rewinds != job.rewinds
            for job in asleep
            if all(not capsule.granted for capsule in job.capsules.values())
        )

    def _look_at(self, job: Job | None, row: RewindRow) -> None:
        if job is None or job.rewinds != row.rewinds or job.state == "ended":
            del self._rows[row.job]
            self._second.forget(row.job)
        elif job.name in self._saved.forgetting:
            pass  # its book would be removed with that of the ended job
        elif job.name not in self._busy and job.state == "ending":
            self._end(job)
        elif job.name not in self._busy and row.number not in self._clear:
            self._busy.add(job.name)
            self._tasks.spawn(self._end_copies(job, row))
        elif row.number in self._clear:
            self._second.copy_what_is_alone(job)

    def _end(self, job: Job) -> None:
        """End a job that was stopped while it was suspended: no signal reaches it."""
        for capsule in list(job.capsules.values()):
            if capsule.code is None and not capsule.granted:
                self._endings.capsule_ended(job, capsule, KILLED)

    async def _end_copies(self, job: Job, row: RewindRow) -> None:
        """End the copies of a suspended job on all hosts that are up, and say then that it is
        suspended."""

        def check() -> None:
            if (job.state, job.rewinds) != ("suspended", row.rewinds):
                raise _Over(f"{job.name} is not suspended any more")

        async def record() -> None:
            self._tables.begin_restoring(row.number)

        def note(text: str) -> None:
            self._fleet.journal.note(job.name, row.kind.under_way, text)

        owners = {host for host, _ in row.owners.values()}
        try:
            copies = EarlierCopies(self._rewinds, job, owners, note, check)
            await copies.end(lambda: set(filter(self._fleet.is_up, owners)), record)
            # After a failed resumption other hosts may have copies.
            await self._rewinds.publish(job)
            check()
            if job.ran_on and job.newest is not None:
                note(await cut_back_what_ran_on(self._rewinds, job, job.newest))
                check()
            self._clear.add(row.number)
            to, newest = self._rows[job.name].to, job.newest  # perhaps ordered meanwhile
            if job.name in self._saving:
                pass  # its end is noted then
            elif to and newest is not None and newest.holders and newest.directory != to:
                self._begin_saving(job, to)
            else:
                self._note_suspended(job)
        except _Over:
            pass
        except Exception as error:  # the loop tries again
            if not isinstance(error, LiveshiftError):
                log.exception("%s: an internal error in its suspension", job.name)
            note(str(error))
            await asyncio.sleep(self._fleet.cluster.timeouts.heartbeat)
        finally:
            self._busy.discard(job.name)


def _text(job: Job) -> str:
    newest = job.newest
    if newest is None:
        return "runs nowhere, and no snapshot of it is left"
    hosts, size = ", ".join(holders_of(job)), units.size(newest.bytes)
    where = f"in the memory of {hosts}" if hosts else f"in {newest.directory}"
    return f"runs nowhere any more: {newest.name}, {size}, is {where}"


def _image(job: Job, generation: Generation, capsule: str) -> str:
    return image_name(generation.number, job.capsules[capsule].index)


def _check_suspended(job: Job, at: Generation | None = None) -> None:
    """Raise Refused if the job is not suspended, or if its images are not those of ``at``."""
    if job.state != "suspended":
        raise _cannot(job, "resumed", f"it is {job.state}, not suspended", "")
    if at is not None and not (job.newest is not None and job.newest.same_images(at)):
        raise _cannot(job, "resumed", "its images have been moved meanwhile", "try again")


def _cannot(job: Job, what: str, why: str, hint: str) -> Refused:
    shows = f"`liveshift events {job.name}` shows its history"
    return Refused(f"{job.name} cannot be {what}: {why}", hint=hint or shows)
