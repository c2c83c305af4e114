# SPDX-License-Identifier: Apache-2.0
"""A rewind of one job, from its durable write to the end: :meth:`Rewind.run` has all steps.

The write has made the job's hosts of the plan the only owners, under new epochs and without a
grant. From then on nothing needs to be undone: what fails is tried again. Copies of before the
rewind end first, since they hold names, addresses and files that the restored ones need, and since
a job must not train twice (ownership.may_restore).

If a further host is lost meanwhile, this rewind gives up, and the orchestrator writes another one,
to the same snapshot (:attr:`RewindEnd.AGAIN`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from ... import units
from ...errors import LiveshiftError
from ..config.timeouts import Timeouts
from ..journal.snapshot_tables import RewindKind, RewindRow
from ..model.jobs import Job
from ..model.snapshots import Generation
from .earlier_copies import EarlierCopies
from .rewind_context import RewindContext
from .rewound_capsule import NotRestorable, RewoundCapsule
from .shared_files import cut_back

log = logging.getLogger("liveshift.rewind")
_Step = Callable[[], Awaitable[None]]


class RewindEnd(enum.Enum):
    """How the work on a rewind has ended."""

    DONE = "done"  # all capsules run
    AGAIN = "again"  # another host is lost: the job must be rewound once more
    JOB_ENDS = "the job ends"  # a person stops it, or a restored capsule has failed
    LOST = "lost"  # a capsule cannot be brought back


class _Stopped(Exception):
    """The work may not go on."""

    def __init__(self, end: RewindEnd) -> None:
        super().__init__(end.value)
        self.end = end


class Rewind:
    """``before``: the hosts that had a capsule of the job when the rewind was written. ``noticed``:
    seconds from the last sign of the lost host, or the end of the lost rank, to that write; None if
    not known. ``error`` says why
    after RewindEnd.LOST."""

    def __init__(
        self,
        context: RewindContext,
        job: Job,
        generation: Generation,
        row: RewindRow,
        before: Iterable[str] = (),
        noticed: float | None = None,
    ) -> None:
        self.error: LiveshiftError | None = None
        self._context = context
        self._job = job
        self._generation = generation
        self.row = row
        self._before = frozenset(before)
        self._limits: Timeouts = context.cluster.timeouts
        self._laps: dict[str, float] = {} if noticed is None else {"until noticed": noticed}
        self._recovered = False

    async def run(self) -> RewindEnd:
        """Bring all capsules back; never raises an error of the job or of its hosts."""
        work = asyncio.ensure_future(self._steps())
        try:
            while not (await asyncio.wait({work}, timeout=self._limits.heartbeat))[0]:
                if (end := self._stops()) is not None:
                    return end
            work.result()
        except NotRestorable as error:
            self.error = error
            return self._stops() or RewindEnd.LOST
        except _Stopped as stopped:
            return stopped.end
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work
        return RewindEnd.DONE

    async def recover(self) -> RewindEnd:
        """Go on with the rewind of an earlier orchestrator, from the end of the earlier copies on:
        that may be repeated. Capsules that are granted are left alone."""
        self._recovered = True
        return await self.run()

    def _stops(self) -> RewindEnd | None:
        """Why the work may not go on; None if it may."""
        if self._job.state != "rewinding" or self._job.rewinds != self.row.rewinds:
            return RewindEnd.JOB_ENDS
        return RewindEnd.AGAIN if self._context.why_again(self._job) else None

    # ---- the steps, in order -------------------------------------------------------------------

    async def _steps(self) -> None:
        self._show("its earlier copies end")
        with self._lap("until the earlier copies had ended"):
            await self._end_earlier()
        self._show("its images are brought to their hosts and restored")
        await self._context.publish(self._job)
        await self._repeat(self._cut_back, "files on shared paths cannot be cut back yet")
        capsules = await self._bring_back()
        if capsules:
            self._laps["to send the images"] = max(each.image_s for each in capsules)
            self._laps["to restore"] = max(each.restore_s for each in capsules)
        self._show("its gates open")
        with self._lap("to go on"):
            # Capsules may have got further epochs, and other hosts, since the first book.
            await self._context.publish(self._job)
            await self._repeat(self._open_gates, "its gates are not open yet")
        await self._repeat(self._end, "its end cannot be recorded")

    async def _end_earlier(self) -> None:
        """Let all hosts that are up end their earlier copies. Return once those have that get a
        capsule, and one of those on which the job last ran as a whole."""

        def targets() -> set[str]:
            return {c.host for c in self._job.capsules.values() if c.code is None}

        async def recorded() -> None:
            await self._repeat(self._begin_restoring, "it cannot be recorded")

        earlier = EarlierCopies(self._context, self._job, self._before, self._note, self._check)
        await earlier.end(targets, recorded)

    async def _begin_restoring(self) -> None:
        self._context.begin_restoring(self.row)

    async def _cut_back(self) -> None:
        ran = self._job.ran_on or self._context.may_have_run(self.row)
        if not (ran or self._generation.saved):
            return  # what has come to its files since its suspension is not the job's
        if said := await cut_back(self._context, self._job, self._generation):
            self._note(said)
        self._job.ran_on.clear()

    async def _bring_back(self) -> list[RewoundCapsule]:
        """Bring all capsules back at the same time; return those that were brought back here."""
        capsules = [
            RewoundCapsule(
                self._context,
                self._job,
                capsule,
                self._generation,
                self.row,
                recovered=self._recovered,
            )
            for capsule in self._job.capsules.values()
            if capsule.code is None
        ]
        tasks = [asyncio.ensure_future(each.bring_back()) for each in capsules]
        try:
            await asyncio.gather(*tasks)
        finally:  # also if one cannot be brought back
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._check()
        return capsules

    async def _open_gates(self) -> None:
        remark = await self._context.open_gates(self._job)
        if remark:
            self._note(remark)

    async def _end(self) -> None:
        self._context.end_rewind(self.row)
        # After the loss of a host, if all parts are known: one of a rank is noticed at once.
        if self.row.lost and "until noticed" in self._laps and not self._recovered:
            self._job.rewind_s = sum(self._laps.values())
        kind = "resumed" if self.row.kind is RewindKind.RESUMPTION else "rewound"
        self._context.note(self._job, kind, self._summary())

    # ---- helpers -------------------------------------------------------------------------------

    async def _repeat(self, step: _Step, failed: str) -> None:
        """Repeat a step until it succeeds; ``failed``: what to note if it does not at once, with
        each reason once."""
        noted = set[str]()
        while True:
            try:
                await step()
                return
            except LiveshiftError as error:
                if str(error) not in noted:
                    noted.add(str(error))
                    self._note(f"{failed}: {error}")
            self._check()
            await asyncio.sleep(self._limits.heartbeat)

    def _check(self) -> None:
        if (end := self._stops()) is not None:
            raise _Stopped(end)

    @contextlib.contextmanager
    def _lap(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._laps[what] = time.monotonic() - began

    def _show(self, what: str) -> None:
        """Let `status` say how far it is, until something else is noted."""
        verb = "goes on from" if self.row.kind is RewindKind.RESUMPTION else "goes back to"
        self._job.rewinding = f"{verb} {self._generation.name}: {what}"

    def _note(self, text: str) -> None:
        log.warning("%s: %s", self._job.name, text)
        self._context.note(self._job, self.row.kind.under_way, text)

    def _summary(self) -> str:
        laps = ", ".join(f"{seconds:.2f} s {what}" for what, seconds in self._laps.items())
        gone = max(0.0, self.row.time - self._generation.time)
        if self.row.kind is RewindKind.RESUMPTION:
            then = f"it was suspended for {gone:.1f} s"
            if self._generation.saved:  # it was adopted, and may have trained on since
                then = f"its snapshot was {gone:.1f} s old"
        else:
            boundary = units.day_time(self._generation.time)
            then = f"{gone:.1f} s of training are repeated, from the boundary of {boundary} on"
        where = ", ".join(f"{c.name} on {c.host}" for c in self._job.capsules.values())
        return f"runs again from {self._generation.name}: {where}; {laps}; {then}"
