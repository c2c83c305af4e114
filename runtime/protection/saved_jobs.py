# SPDX-License-Identifier: Apache-2.0
"""Jobs whose images lie in a directory that all hosts see: suspended ones are saved there, and are
loaded from there to be resumed.

A snapshot in a directory has all that is needed to let its job go on, so a job can also be resumed
that has ended, or that this orchestrator has never had. It is then *adopted*: entered into the
journal as a job that is suspended at that snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Coroutine, Iterable

from ... import units
from ...criu_glue.network.overlay import Overlay
from ...errors import Refused
from ..daemon.tasks import Tasks
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..messages import ResumptionOrdered, RunJob
from ..model import run_spec
from ..model.jobs import Capsule, Job
from ..model.rewind_places import rewind_plan
from ..model.snapshots import Generation
from ..snapshot.directory_images import DirectoryImages, Found
from ..snapshot.protection_row import Holders, reachable
from ..snapshot.saved_snapshot import overlay_of


class SavedJobs:
    """The orchestrator has one instance, which saves the images of suspended jobs, loads them
    again, and adopts jobs that only a directory has. Only one piece of work uses the images of a
    job at a time; ``busy`` says which."""

    def __init__(self, fleet: Fleet, images: DirectoryImages, endings: Endings) -> None:
        self._fleet = fleet
        self._images = images
        self._endings = endings
        self._tasks = Tasks()
        self.forgetting: set[str] = set()
        """The jobs whose hosts still remove what ended jobs have left, by name: nothing of them may
        be on a host yet."""

    @property
    def busy(self) -> dict[str, str]:
        """Each job whose images are being saved or loaded → a text that says which."""
        return self._images.busy

    def check_free(self, job: Job, what: str) -> None:
        """Raise Refused while work uses the images of a job; ``what`` they were to be then."""
        if job.name in self.busy:
            raise Refused(f"{job.name} cannot be {what} now: {self.busy[job.name]}")

    def begin(self, job: Job, what: str, work: Coroutine[None, None, None]) -> None:
        """Do ``work`` with the images of a job. ``what`` is the text that follows "its images are
        being". Raises Refused while other work uses these images."""
        try:
            self.check_free(job, what)
        except Refused:
            work.close()
            raise
        self.busy[job.name] = f"its images are being {what}"
        self._tasks.spawn(self._only(job, work))

    async def _only(self, job: Job, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        finally:
            self.busy.pop(job.name, None)

    # ---- a suspended job -----------------------------------------------------------------------

    async def save(self, job: Job, to: str) -> None:
        """Save all images of a suspended job. After that no host needs to hold them. If the job was
        stopped meanwhile, the directory has them all the same. Raises LiveshiftError; then hosts
        hold them still."""
        generation = job.newest
        assert generation is not None
        giving = reachable(job, Holders.of(self._fleet.views()))
        holders = {name: giving[name] or hosts for name, hosts in generation.holders.items()}
        await self._images.save(job, dataclasses.replace(generation, holders=holders), to)
        saved = dataclasses.replace(generation, directory=to, saved="", holders={})
        journal = self._fleet.journal
        suspended = job.state == "suspended"
        with journal.together():
            journal.snapshots.note_saved(job.name, saved.name, to, saved.time)
            if suspended:
                journal.snapshots.rewrite(saved)
        if suspended:
            job.newest = saved

    async def find(self, job: Job, directory: str) -> Found:
        """The snapshot of a suspended job in a directory. Raises LiveshiftError, Refused if it is
        not the one at which the job is suspended."""
        generation = job.newest
        assert generation is not None
        name = generation.saved_name
        found = await self._images.find(self._fleet.up(), directory, job.name, name)
        saved = found.saved
        if saved.time != generation.time or set(saved.capsules) != set(job.capsules):
            raise Refused(
                f"{name} of {job.name} in {directory} is not the snapshot at which {job.name} is"
                " suspended: they were taken at different times",
                hint=f"`liveshift stop {job.name}` gives up the one here; then the other one can be"
                " resumed",
            )
        return found

    async def load(
        self, job: Job, generation: Generation, where: dict[str, str], found: Found, directory: str
    ) -> Generation:
        """Let the job's next hosts load its images, and record them as the holders. Raises
        LiveshiftError; then the job stays suspended."""
        job.taking = generation.number  # so the hosts are told to keep what they load
        try:
            there = dataclasses.replace(generation, directory=directory)
            await self._images.load(job, there, where, found.saved)
            if job.state != "suspended":
                raise Refused(f"{job.name} is {job.state} by now")
            holders = {name: [host] for name, host in where.items()}
            loaded = dataclasses.replace(there, holders=holders)
            self._fleet.journal.snapshots.rewrite(loaded)
            job.newest = loaded
            return loaded
        finally:
            job.taking = 0

    # ---- a job that this orchestrator does not have --------------------------------------------

    async def adopt(
        self, who: str, name: str, directory: str, snapshot: str, *, dry_run: bool
    ) -> Job | ResumptionOrdered:
        """Enter a job that a directory has as a suspended one; what the history has of an ended job
        of that name stays. With ``dry_run`` return instead where it would go on.

        Raises LiveshiftError, and changes nothing, if there is no such snapshot, if no trusted
        cluster has signed it, if the name or its addresses are taken, if there is no room, or if
        the journal cannot be written.
        """
        found = await self._images.find(self._fleet.up(), directory, name, snapshot)
        saved = found.saved
        asked = saved.request()
        overlay = overlay_of(saved, self._fleet.cluster)
        beside = self._in_the_way(name, overlay)
        names = dict.fromkeys(saved.capsules, "")
        up = self._fleet.up()
        holders = dict.fromkeys(names, up)
        seen = Generation(
            *(0, name, saved.boundary, saved.time, 0, {}, holders),
            gpus=saved.gpus,
            carried=saved.carried,
        )
        last = self._fleet.left_hosts.recent()
        plan = rewind_plan(self._fleet.views(), seen, names, names, last=last)
        if isinstance(plan, str):
            raise Refused(f"{name} cannot be resumed: {plan}", hint="`liveshift status -o wide`")
        if dry_run:
            where = {capsule: place.host for capsule, place in plan.items()}
            ago = max(0.0, time.time() - saved.time)
            return ResumptionOrdered(name, saved.snapshot, saved.boundary, ago, where)
        async with contextlib.AsyncExitStack() as locks:
            for ended in beside:  # nobody else forgets them: the name may have another owner then
                await locks.enter_async_context(ended.forgetting)
            still = self._in_the_way(name, overlay)
            if any(all(job is not ended for ended in beside) for job in still):
                raise Refused(f"{name} cannot be resumed: another job took its place meanwhile")
            job = self._enter(who, found, asked, directory, overlay, still)
            self.forgetting.add(name)
            self.busy[name] = "hosts still remove what the ended job has left"
            try:
                # After the write, which may fail: output goes, too. A host that is not reached now
                # does it when it reports again, for another name (CapsuleTable.forget_unknown). Of
                # this name it removes only the capsules, which are of fewer rewinds (end_earlier);
                # what they printed stays there as repeated output until the adopted job goes.
                for ended in still:
                    await self._endings.forget_on_hosts(ended.name)
            finally:
                self.busy.pop(name, None)
                self.forgetting.discard(name)
        return job

    def _enter(
        self,
        who: str,
        found: Found,
        asked: tuple[RunJob, int],
        directory: str,
        overlay: Overlay,
        ended: Iterable[Job],
    ) -> Job:
        """Record the job of a snapshot in the place of ended ones; all of it or nothing. ``asked``:
        how it was started, and by whom."""
        saved, journal = found.saved, self._fleet.journal
        name, (run, uid) = saved.job, asked
        indexes = {c: (each.index, found.host) for c, each in saved.capsules.items()}
        spec, text = run_spec.encode(run, uid), _came_from(found, directory)
        # The job's next snapshots are saved beside this one, so they need higher numbers.
        above = int(saved.snapshot[1:])
        with journal.together():
            for each in ended:
                journal.remove_job(each.name)
            rewinds = journal.snapshots.rewinds(name)
            started, first = journal.add_job(name, overlay.vni, overlay.subnet, spec, indexes)
            generation = Generation(
                journal.snapshots.begin_snapshot(name, above),
                name,
                saved.boundary,
                saved.time,
                rewinds,
                {capsule: (found.host, first) for capsule in saved.capsules},
                {},
                saved.bytes,
                directory,
                saved.snapshot,
                saved.gpus,
                carried=saved.carried,
            )
            row = journal.snapshots.suspend(generation, text)
            journal.snapshots.note_saved(name, saved.snapshot, directory, saved.time)
            # No earlier copy is anywhere: the job must not wait for the host named above.
            journal.snapshots.begin_restoring(row.number)
            journal.add_event(name, "adopted", text, who)
            since = journal.last_event()
        capsules = {c: Capsule(c, index, host, first) for c, (index, host) in indexes.items()}
        job = Job(name, overlay, run, uid, started, capsules, newest=generation, since=since)
        job.enter(row.owners, row.rewinds, "suspended")
        for capsule in capsules.values():
            capsule.started = True
        for each in ended:
            del self._fleet.jobs[each.name]
        self._fleet.jobs[name] = job
        return job

    def _in_the_way(self, name: str, overlay: Overlay) -> list[Job]:
        """The ended jobs that must be forgotten first, since they have the name or the addresses.
        Raises Refused if one has them that has not ended."""
        jobs = self._fleet.jobs.values()
        beside = [job for job in jobs if name == job.name or overlay.vni == job.overlay.vni]
        for job in beside:
            if job.state != "ended":
                what = "the name" if job.name == name else f"the addresses {overlay.subnet}"
                raise Refused(
                    f"{name} cannot be resumed: {job.name}, which is {job.state}, has {what} that"
                    f" its processes know",
                    hint=f"wait for its end, or `liveshift stop {job.name}`",
                )
        self._fleet.refuse_unknown()
        return beside


def _came_from(found: Found, directory: str) -> str:
    saved = found.saved
    by = (
        f"the cluster {saved.cluster} (trusted as {found.signer})"
        if found.signer
        else "this cluster"
    )
    taken = units.moment(saved.time)
    return (
        f"from {saved.snapshot} in {directory}, which {by} has saved: {saved.boundary} at {taken}"
    )
