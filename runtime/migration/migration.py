# SPDX-License-Identifier: Apache-2.0
"""What all kinds of migration share: a record, steps, gates, an end.

The two kinds are :mod:`.host_migration` (to another host) and :mod:`.gpu_swap` (to another GPU).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ...errors import LiveshiftError, Refused
from .. import messages
from ..messages import Cost, Message, MigrationRow, Prediction, Rounds
from ..messages.answers import expected
from ..model.deadlines import FreezeBudget
from ..model.steps import ENDS, MigrationStep
from ..model.timeline import Timeline
from .context import MigrationContext, NoBoundary
from .order import Order

log = logging.getLogger("liveshift.migration")
M = TypeVar("M", bound=Message)

_TO_AND_FRO = frozenset({MigrationStep.RESTORING, MigrationStep.RETURNING})
"""Between these steps a migration may go to and fro while neither host answers."""

RESUME_WAIT_S = 2.0
"""The destination waits at most this many seconds for the capsule's first sign of progress. Only
the time at which the move counts as done depends on it."""


class Migration(ABC):
    """A migration that is under way or over.

    It is made from an :class:`Order` that names the destination. ``source`` and ``destination`` are
    hosts. ``run`` and ``recover`` never raise: ``step`` and ``error`` say how the migration ended.
    """

    kind: ClassVar[str]
    """The name of this kind of migration in the record."""
    allowed: ClassVar[Mapping[MigrationStep, frozenset[MigrationStep]]]
    """For each step, the steps that may follow it."""
    cancellable: ClassVar[frozenset[MigrationStep]]
    """The steps in which a person may cancel the migration."""

    def __init__(self, context: MigrationContext, number: int, order: Order) -> None:
        self.number = number
        self.name = f"m{number}"
        self.order = order
        self.job = order.job
        self.capsule = order.capsule
        self.source = order.capsule.host
        self.destination = order.destination
        self.reason = order.reason
        self.by = order.by
        self.step = MigrationStep.PREPARING
        self.error: LiveshiftError | None = None
        self.holds_gates = False  # whether it keeps the gates of all the job's ranks closed
        self.waits = ""  # for what, while it can do nothing else until that comes
        self.times = Timeline()
        self.precopy: Rounds | None = None
        self.predicted: Prediction | None = None
        self.cost: Cost | None = None
        self._context = context
        self._limits = order.job.timeouts(context.cluster)
        self._cancelled: Refused | None = None
        self._work: asyncio.Future[None] | None = None  # what a cancel interrupts
        self._whole: asyncio.Future[None] | None = None  # what :meth:`overtake` interrupts

    @abstractmethod
    async def run(self) -> None:
        """Do all steps of the migration, in order."""

    @abstractmethod
    async def recover(self) -> None:
        """Go on after a restart of the orchestrator, from what its journal says."""

    @property
    def may_save(self) -> bool:
        """Whether its capsule may yet go on by this migration though a host of it is lost."""
        return False

    @property
    def must_end(self) -> bool:
        """Whether not even a rewind may interrupt what it does now."""
        return False

    @property
    def way(self) -> tuple[str, str]:
        """Where the migration leads from and to, in words for people."""
        return self.source, self.destination

    def cancel(self, by: str) -> None:
        """Cancel the migration: the capsule stays where it is. The migration ends a little later,
        as a failed one does. Raises Refused if it is too late or already being rolled back.
        """
        if self.step in ENDS:
            raise Refused(f"{self.name} is over: {self.step.value}")
        if self._cancelled is not None or self.step is MigrationStep.ROLLING_BACK:
            raise Refused(f"{self.name} is being rolled back already")
        if self.step not in self.cancellable:
            raise Refused(
                f"{self.name} is {self.step.value}: too late to cancel it",
                hint=f"`liveshift events {self.name}` shows how it ends; a capsule that has moved"
                " can be moved back",
            )
        self._cancelled = Refused(f"cancelled by {by}")
        if self._work is not None:  # else the work has not begun, or an error has just ended it
            self._work.cancel()

    async def until_over(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, which is :meth:`run` or :meth:`recover`, unless a rewind overtakes it.
        An error that the work meets after that is logged."""
        if self.step in ENDS:  # a rewind came before it had begun
            work.close()
            return
        self._whole = asyncio.ensure_future(work)
        try:
            await asyncio.wait({self._whole})
        finally:
            self._whole.cancel()  # asyncio.wait() leaves it when we are cancelled
        if self.step is not MigrationStep.REWOUND:
            self._whole.result()
        elif not self._whole.cancelled() and (error := self._whole.exception()) is not None:
            # It is over all the same, and others wait for its end.
            log.error(
                "%s was ended by a rewind, and its work by an error", self.name, exc_info=error
            )

    def overtake(self, why: LiveshiftError) -> None:
        """End the migration: a rewind of its job has just been written, which has this end of it,
        too (:func:`.migration_records.write_rewound`).

        Nothing of the order of things is done after this. Whatever the hosts have of the migration
        was made under an earlier count of rewinds: it must end, and each claim for it is ruled so.
        The rewind opens the gates.
        """
        assert self.waits or not self.must_end, f"{self.name} goes on"
        self.error, self.holds_gates = why, False
        self.times.thaw()
        self.times.end()
        self._advance(MigrationStep.REWOUND)
        if self._whole is not None:
            self._whole.cancel()

    async def _unless_cancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work that a cancel may interrupt; raises the Refused of that cancel."""
        self._work = asyncio.ensure_future(work)
        if self._cancelled is not None:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if self._cancelled is None or self.step is MigrationStep.REWOUND:
                raise  # the orchestrator itself ends, or a rewind has overtaken this
            raise self._cancelled from None
        finally:
            self._work = None

    def row(self) -> MigrationRow:
        """Return the record of the migration as it is now, for status, events and reports."""
        times, (source, destination) = self.times, self.way
        return MigrationRow(
            name=self.name,
            capsule=self.capsule.name,
            source=source,
            destination=destination,
            reason=self.reason,
            by=self.by,
            epoch=self.capsule.epoch,
            state=self.step.value,
            asked=times.asked,
            seconds=times.seconds(),
            frozen_s=times.frozen_seconds(),
            image_bytes=times.image_bytes,
            bytes=times.bytes,
            expected_bytes=times.expected_bytes,
            link_rate=times.link_rate(),
            phases=list(times.phases),
            error=str(self.error) if self.error else None,
            hint=self.error.hint if self.error else None,
            kind=self.kind,
            precopy=self.precopy,
            predicted=self.predicted,
            cost=self.cost,
        )

    async def _quiesce(self) -> None:
        """Bring the job to a boundary; no rank enters a collective until the gates open again.

        A job that talks over TCP only may be frozen without a boundary, because TCP itself waits.
        """
        # While its gates are closed a job cannot show that it trains: the loss of a host would be
        # noticed much later.
        await self._context.until_heard(self.job, self._pause_by)
        self._advance(MigrationStep.QUIESCING)
        self.holds_gates = True
        with self.times.phase("quiesce") as detail:
            try:
                detail.append(await self._context.quiesce(self))
            except NoBoundary as error:
                if not error.only_tcp:
                    raise
                self._context.note(self, f"frozen in place: {error}")
                detail.append("frozen in place")

    async def _reopen(self) -> None:
        """Let the job's ranks communicate again. On a host that is out of reach the gates open by
        themselves after a while."""
        if self.holds_gates:
            self.holds_gates = False
            frozen = self.times.frozen_at is not None
            with self.times.phase("reopen", frozen=frozen) as detail:
                detail += filter(None, [await self._context.reopen(self)])

    async def _resume(self) -> None:
        """Open the gates for the capsule, which runs now; wait a while for its first collective."""
        self._advance(MigrationStep.RESUMING)
        await self._reopen()
        self.times.thaw()
        began = time.monotonic()
        with contextlib.suppress(Exception):  # the capsule runs, even without a sign of progress
            resume = messages.Resume(self.capsule.name, RESUME_WAIT_S)
            seen = await self._request(self.destination, resume, RESUME_WAIT_S + 5, messages.Moved)
            self.times.add(seen.phases, began)

    def _note_full_dump(self, phases: Sequence[messages.Phase]) -> None:
        """Note in the history if the move is a full dump, and why."""
        for phase in phases:
            if phase.name == "pre-copy" and phase.detail.startswith("full dump"):
                why = phase.detail.removeprefix("full dump")
                self._context.note(self, f"copies all memory while paused (full dump){why}")

    def _note_device_path(self, phases: Sequence[messages.Phase]) -> None:
        """Note in the history by which path device memory left its GPUs, and why."""
        for text in dict.fromkeys(phase.detail for phase in phases if phase.name == "gpu save"):
            self._context.note(self, text)

    @property
    def _pause_by(self) -> float:
        """When the pause should begin at the latest, in monotonic seconds."""
        return float("inf")

    @property
    def _freeze_budget(self) -> FreezeBudget:
        return FreezeBudget(self._limits, self.times.frozen_at or time.monotonic())

    async def _request(self, host: str, message: Message, timeout: float, expect: type[M]) -> M:
        answer = await self._context.request(host, message, timeout)
        return expected(expect, host, message, answer)

    def _advance(self, to: MigrationStep) -> None:
        assert to is self.step or to in self.allowed[self.step], f"{self.step} may not become {to}"
        self.step = to
        if to not in _TO_AND_FRO:
            self.waits = ""
        try:
            self._context.record(self)
        except Exception:  # go on: only the commit decides about ownership, and rule() about copies
            log.exception("%s: cannot record that it is %s", self.name, to.value)

    async def _end_undone(self, *, ended: bool = False, because: str = "") -> None:
        """End a migration that moved nothing and lost nothing: as failed, or as ended with the job
        if the capsule's command has ended (``ended``, or its code is known). ``because``: why the
        command ended, if known."""
        code = self.capsule.code
        if not ended and code is None:
            await self._end(MigrationStep.FAILED)
            return
        how = "ended" if code is None else f"ended with code {code}"
        way = " → ".join(self.way)
        why = f": {because}" if because else ""
        self.error = LiveshiftError(f"{self.capsule.name} {how} before it could move {way}{why}")
        await self._end(MigrationStep.JOB_ENDED)

    async def _end(self, how: MigrationStep) -> None:
        await self._reopen()
        self.times.end()
        self._advance(how)
        if (error := self.error) is not None:  # kept for its text, not with the frames of the work
            error.__traceback__ = error.__cause__ = error.__context__ = None
