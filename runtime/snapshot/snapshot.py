# SPDX-License-Identifier: Apache-2.0
"""One snapshot of a job: :meth:`Snapshot.run` has all steps in order.

The image of each capsule goes to a holder, and the capsule runs on where it is. All images
together are one consistent cut, because of one order: *no source dumps before the networks of all
capsules are locked, and none thaws before all are dumped*. A source keeps its lock from its answer
to LockCapsule until its thaw, and refuses to dump after a thaw. So there is a moment at which all
are locked, and no capsule receives anything between that moment and its own dump. That also holds
for the connections of a job that is frozen without a boundary. And there is a moment at which all
are frozen, as their images have them. So files that several capsules write have one size then
(shared_files.py).

No host promises anything, and no ownership changes. So every failure has one answer: thaw all, open
the gates, and keep the snapshot before this one. The snapshot counts only after one durable write,
which comes when each holder has compared the pages with its source.

The last snapshot before a suspension thaws nothing before that write either. The write then also
says that the job is suspended, and the orchestrator ends the frozen capsules. So the job trains no
step and prints no line that it repeats once it is resumed. If the time for the pause is over before
the write, sources thaw as ever, and the job is not suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from ...errors import LiveshiftError, Refused, StepFailed
from ..cost.model import max_pause
from ..daemon.faultpoints import reached
from ..migration.context import NoBoundary
from ..model.holders import beside, die_together
from ..model.jobs import Job
from ..model.snapshots import Generation, image_name
from .capsule_image import CapsuleImage
from .context import SnapshotContext

log = logging.getLogger("liveshift.snapshot")
T = TypeVar("T")

LAST_MOMENT_S = 1.0
"""A job is not suspended if fewer seconds of its pause are left, or a tenth of a short pause: its
sources thaw by themselves then, unless the order to end their copies comes first."""


class Snapshot:
    """A snapshot that is under way or over; ``number`` is the one that the journal gave to it.

    ``holders``: the holder of each capsule's image. :meth:`run` and :meth:`recover` never raise:
    ``generation`` is what they have completed, else ``error`` says why there is nothing.
    ``suspends``: why the job is suspended with it, for the history; "" if it goes on.
    ``to``: the directory in which the images of a suspended job are saved next, or "". ``asked``:
    whether a person wants it; else capsules that use GPUs are refused. ``ordered``: whether it is
    taken for one order, of which nothing comes if it fails. ``weaker``: whether it may take the
    place of a snapshot that no single death can destroy, though one can destroy this one.
    """

    def __init__(
        self,
        context: SnapshotContext,
        number: int,
        job: Job,
        holders: Mapping[str, str],
        *,
        suspends: str = "",
        to: str = "",
        asked: bool = True,
        ordered: bool = False,
        weaker: bool = False,
    ) -> None:
        self.number = number
        self.name = f"s{number}"
        self.job = job
        self.generation: Generation | None = None
        self.error: LiveshiftError | None = None
        self.released = asyncio.Event()
        """Set while this snapshot does not hold the job's gates."""
        self.released.set()
        self.seconds: dict[str, float] = {}
        """The parts of the pause: quiesce, lock, dump, thaw, reopen. Of a job that is suspended:
        seal in place of the last two."""
        self._suspends = suspends
        self._to = to
        self._asked = asked
        self._ordered = ordered
        self._context = context
        try:
            self._limits = job.timeouts(context.cluster)
        except Refused:  # run() says so; recover() must thaw what there is all the same
            self._limits = context.cluster.timeouts
        owners, domains = job.owners.values(), context.cluster.domains
        strong = job.newest and die_together(job.newest.holders, owners, domains) is None
        self._parts = [
            CapsuleImage(
                context,
                image_name(number, capsule.index),
                job,
                capsule,
                (holder := holders.get(capsule.name, "")),
                self._limits,
                neighbour=bool(beside(holder, owners, domains)),
                both=bool(strong) and not weaker,
            )
            for capsule in job.capsules.values()
        ]
        self._rewinds = job.rewinds
        self._boundary = ""
        self._time = 0.0  # of the boundary, in seconds since 1970
        self._boundary_at = 0.0  # the same in monotonic seconds
        self._pause = 0.0  # the longest that is allowed, in seconds
        self._until = 0.0  # monotonic time at which the pause must be over
        self._locks = False  # whether networks may be locked, until the gates are released
        self._work: asyncio.Future[None] | None = None  # what an abandon interrupts
        self._abandoned: Refused | None = None
        self.gave_way = False
        """Whether a move of the job began before this snapshot was over."""

    @property
    def pause_s(self) -> float:
        """Seconds from the first closed gate until all gates were open again."""
        return sum(self.seconds.values())

    @property
    def locks(self) -> bool:
        """Whether the networks of the job may be locked. They are not while the job comes to a
        boundary."""
        return self._locks and not self.released.is_set()

    @property
    def refused(self) -> set[str]:
        """The holders that have refused an image."""
        return {part.holder for part in self._parts if part.refused}

    @property
    def problems(self) -> list[str]:
        """Which capsules did not get their device state back when they were thawed, and why."""
        return [part.problem for part in self._parts if part.problem]

    @property
    def abandoned(self) -> bool:
        """Whether it has ended because :meth:`abandon` was called."""
        return self.error is not None and self.error is self._abandoned

    async def run(self) -> None:
        """Do all steps of the snapshot, in order."""
        try:
            await self._unless_abandoned()
        except Exception as error:
            self.error = _as_ours(error)
        if self._suspends and self.error is None:
            await self._suspend()
            if self.generation is not None:
                return
        await self._let_go()
        await self._close()  # after a failure too: it ends the sessions
        if self.error is not None:
            return
        try:
            await self._complete()
        except Exception as error:
            self.error = _as_ours(error)

    async def recover(self) -> None:
        """Undo a snapshot that an earlier orchestrator has left under way, however far it was."""
        self.error = StepFailed("snapshot", "the orchestrator was restarted")
        for part in self._parts:
            part.begun = True
        self._locks = True  # the earlier orchestrator may have locked networks
        if not self._context.at_gates(self.job):  # else that migration opens them
            self.released.clear()  # it may have closed them
        await self._let_go()
        await self._close()

    def _check_asked(self) -> None:
        """Raise Refused if nobody wants this snapshot and a capsule uses a GPU: taking device state
        off a GPU and back has not been seen to work on enough GPUs to be a default."""
        using = [part.name for part in self._parts if part.gpu_need.used]
        if using and not self._asked:
            raise Refused(
                f"{using[0]} uses a GPU, and such jobs have snapshots only if that is asked for",
                hint="`liveshift run --snapshot-every auto` asks for them",
            )

    def abandon(self, why: str, *, to_a_move: bool = False) -> None:
        """Give the snapshot up, unless all its capsules have been dumped already. It ends a little
        later, as a failed one does. ``to_a_move``: because a move of the job begins."""
        self.gave_way |= to_a_move
        if self.error is not None or self._abandoned is not None:
            return
        if self._work is None or self._work.cancel():
            self._abandoned = Refused(f"given up: {why}")

    # ---- the steps, in order -------------------------------------------------------------------

    async def _take(self) -> None:
        self.job.timeouts(self._context.cluster)  # raises Refused if they do not fit
        sizes = await self._all(CapsuleImage.inspect)
        self._check_asked()
        come: dict[str, dict[str, int]] = defaultdict(dict)
        for part, size in zip(self._parts, sizes, strict=True):
            come[part.holder][part.name] = size
        await self._all(lambda part: part.hold(dict(come[part.holder])))
        # The hosts of a suspended job are to be free.
        copied = [p for p in self._parts if not self._suspends and p.host != p.holder]
        for part, size in zip(self._parts, sizes, strict=True):
            if part in copied:
                come[part.host][part.name] = size
        await self._all(
            lambda part: part.send_ahead(
                come[part.host] if part in copied else None, ordered=self._ordered
            )
        )
        self._check_job()
        with self._timed("quiesce"):
            await self._close_gates()
        self._pause = max_pause(self._context.cluster.precopy, self._limits)
        self._until = time.monotonic() + self._pause
        self._locks = True
        with self._timed("lock"):
            left = self._left()
            await self._all(lambda part: part.lock(left))
        self._time, self._boundary_at = time.time(), time.monotonic()
        with self._timed("dump"):
            rest = self._left()
            await self._all(lambda part: part.dump(rest))

    async def _close_gates(self) -> None:
        """Bring the job to a boundary; a job that talks over TCP only may be frozen without one."""
        if move := self._context.at_gates(self.job):
            raise Refused(f"{move} holds the ranks of {self.job.name}")
        self.released.clear()  # with no await since the look: now no migration closes them
        try:
            self._boundary = await self._context.close_gates(self.job)
        except NoBoundary as error:
            if not error.only_tcp:
                raise
            self._boundary = f"frozen in place: {error}"

    async def _suspend(self) -> None:
        """Complete the snapshot while all capsules are frozen: they stay so, and their gates stay
        closed. After an error the job goes on."""
        try:
            with self._timed("seal"):
                left = self._left()
                await self._all(lambda part: part.seal(left))
                await self._complete()
            self.released.set()
        except Exception as error:
            self.error = _as_ours(error)

    async def _complete(self) -> None:
        """Let the holders compare what they have; then make the snapshot the newest one."""
        sizes = await self._all(CapsuleImage.check_held)
        generation = Generation(
            self.number,
            self.job.name,
            self._boundary,
            self._time,
            self._rewinds,
            {part.name: (part.host, part.epoch) for part in self._parts},
            {part.name: part.holders for part in self._parts},
            sum(sizes),
            gpus={part.name: part.gpu_need for part in self._parts if part.gpu_need.used},
            own_copies=[part.name for part in self._parts if part.own_copy],
            carried=[part.name for part in self._parts if part.carries],
        )
        if self._suspends:
            # With the time over, capsules have gone on by themselves; so they would have before
            # their hosts learn of the suspension, if it was written now.
            self._left(min(LAST_MOMENT_S, self._pause / 10))
            self._context.suspend(generation, self._suspends, self._to)
            self.job.ran_on.clear()
        else:
            self._context.complete(generation)
        self.job.goes_on_from(self._boundary_at)
        self.generation = generation
        await reached("snapshot.complete")

    # ---- its end, whatever has happened --------------------------------------------------------

    async def _let_go(self) -> None:
        """Thaw all capsules, then open the gates that were closed; never raises.

        A silent host keeps no gates closed elsewhere: the others must soon show that the job
        trains, or it is rewound though that host lives."""
        begun = [part for part in self._parts if part.begun]
        thaws = asyncio.gather(*(part.thaw() for part in begun))
        with self._timed("thaw") if self.error is None else contextlib.nullcontext():
            await asyncio.gather(*(part.left.wait() for part in begun))
        await self._open_gates()
        await thaws

    async def _open_gates(self) -> None:
        if self.released.is_set():
            return
        with self._timed("reopen"):
            try:
                if remark := await self._context.open_gates(self.job):
                    log.info("%s of %s: %s", self.name, self.job.name, remark)
            except Exception:
                log.exception("%s: the gates of %s stay closed", self.name, self.job.name)
            finally:
                self.released.set()

    async def _close(self) -> None:
        """End the sessions; never raises."""
        await asyncio.gather(*(part.close() for part in self._parts if part.begun))

    # ---- parts ---------------------------------------------------------------------------------

    async def _unless_abandoned(self) -> None:
        """Take the images; raises the Refused of an abandon."""
        self._work = asyncio.ensure_future(self._take())
        if self._abandoned is not None:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if self._abandoned is None:
                raise  # the orchestrator itself ends
            raise self._abandoned from None

    async def _all(self, step: Callable[[CapsuleImage], Awaitable[T]]) -> list[T]:
        """Do a step for all capsules at once. After an error in one of them, all have ended."""
        tasks = [asyncio.ensure_future(step(part)) for part in self._parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _check_job(self) -> None:
        """Raise StepFailed if the job is not what it was when the snapshot began."""
        living = [c for c in self.job.capsules.values() if c.code is None]
        now = {c.name: (c.host, c.epoch) for c in living}
        same = (self.job.state, self.job.rewinds) == ("running", self._rewinds)
        if not same or now != {part.name: (part.host, part.epoch) for part in self._parts}:
            why = f"{self.job.name} has changed since {self.name} began"
            raise StepFailed("snapshot", why)

    def _left(self, least: float = 0.0) -> float:
        """Seconds left of the longest pause; raises StepFailed if these are no more than
        ``least``."""
        left = self._until - time.monotonic()
        if left <= least:
            raise StepFailed(
                "snapshot",
                f"{self.name} would pause {self.job.name} for too long",
                hint="precopy.max_pause limits the pause",
            )
        return left

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began


def _as_ours(error: Exception) -> LiveshiftError:
    """Return a LiveshiftError as it is; log any other error and wrap it into a StepFailed."""
    if isinstance(error, LiveshiftError):
        return error
    log.exception("a snapshot met an internal error", exc_info=error)
    return StepFailed("snapshot", f"internal error: {type(error).__name__}: {error}")
