# SPDX-License-Identifier: Apache-2.0
"""The part of a move during which the job trains: survey, sandbox, plan, pre-copy.

If the source host has a deadline, the deadline limits this part. The choice of the way depends on
it, no round begins that would miss it, and a move that will be too late notes that at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from ... import units
from ...errors import LiveshiftError
from .. import messages
from ..config.cluster import Cluster
from ..cost.comparison import decided
from ..cost.model import max_pause
from ..cost.prediction import besides_memory, sharpened
from ..cost.words import too_late
from ..model.deadlines import check_freeze
from ..model.gpu_asked import left
from ..model.steps import MigrationStep
from . import second_look
from .context import MigrationContext, expected_bytes, limit_bytes, what_breaks
from .migration import Migration
from .order import Order

LEAST_PRECOPY_S = 0.5
"""The copy of directories and output gets at least this many seconds, even close to a deadline."""
ENDING_S = 0.5
"""The plan allows this many seconds from the end of the pause until the source host is empty."""
PLACE_LEAST_S, PLACE_POLL_S = 5.0, 0.1


class BeforePause(Migration):
    """HostMigration builds on this class, which has the steps up to the pause of the job.
    ``until``: the time by which the capsule must have left its host, in monotonic seconds; None if
    there is no deadline. The steps raise LiveshiftError; HostMigration then rolls back."""

    def __init__(self, context: MigrationContext, number: int, order: Order) -> None:
        super().__init__(context, number, order)
        self.until = order.until  # monotonic time by which the capsule must be gone
        self._inspected: messages.Inspected | None = None
        self._left_s = 0.0  # seconds that sending memory would take if the job were paused now

    def let_go(self) -> None:
        """Let go of what only a migration under way needs: memory keeps many that have ended, and
        the survey is most of one."""
        self._inspected = None

    async def end_sooner(self, until: float) -> None:
        """Apply a deadline that came after the move began: the capsule must be gone by ``until``
        (monotonic seconds)."""
        self.until = until if self.until is None else min(self.until, until)
        if self.step is not MigrationStep.PRECOPYING or self.predicted is None:
            return
        sooner = max(0.0, self.until - time.monotonic() - self.predicted.seconds - ENDING_S)
        end_sooner, limit = messages.EndSooner(self.capsule.name, sooner), self._limits.suspicion
        with contextlib.suppress(LiveshiftError):  # without it the move goes on as before
            await self._context.request(self.source, end_sooner, limit)

    def progressed(self, report: messages.Progressed) -> None:
        """Take a report of the pre-copy. Once the job is frozen, no pre-copy runs any more."""
        if self.step not in (MigrationStep.PRECOPYING, MigrationStep.QUIESCING):
            return
        unsent = report.left / report.best if report.best else 0.0
        self._left_s = max(unsent, report.delta_s or 0.0)
        stop = None
        if report.delta_s is not None and self.predicted is not None:
            stop = report.delta_s + besides_memory(self.predicted)
        self.precopy = messages.Rounds(
            report.round,
            report.bytes,
            report.dirty,
            report.left,
            report.rate,
            report.slow_down,
            stop,
            report.best,
        )

    async def _prepare(self) -> messages.Reserved:
        """Survey the source; preflight and build the sandbox at the destination. The job trains
        on."""
        limit = self._limits.prepare
        with self.times.phase("prepare") as detail:
            inspected = await self._inspect(limit)
            self.times.expected_bytes = expected_bytes(inspected)
            wanted = gpus_wanted(self.order, inspected)
            inspected, reserved = await second_look.reserve(
                inspected,
                lambda seen: self._reserve(seen, self.source, self.destination, limit, wanted),
                lambda: self._inspect(limit),
            )
            self._inspected = inspected
            self.predicted = self._context.predict(self.order, inspected, reserved, self._within())
            self._note_if_late(self.predicted)
            for warning in reserved.warnings:
                self._context.note(self, warning)
            tasks = len(inspected.survey.pids)
            detail.append(f"{tasks} task{'s' if tasks != 1 else ''}")
        if breaks := what_breaks(inspected.outside):
            self._context.note(self, breaks)
        return reserved

    async def _inspect(self, limit: float) -> messages.Inspected:
        inspect = messages.Inspect(self.capsule.name)
        return await self._request(self.source, inspect, limit, messages.Inspected)

    async def _reserve(
        self,
        inspected: messages.Inspected,
        source: str,
        destination: str,
        limit: float,
        wanted: Sequence[tuple[str, str]] = (),
    ) -> messages.Reserved:
        cluster = self._context.cluster
        reserve = reserve_request(self.name, self.order, inspected, source, cluster, wanted)
        return await self._request(destination, reserve, limit, messages.Reserved)

    async def _precopy(self, reserved: messages.Reserved) -> None:
        """Copy directories, output and memory to the destination while the job trains."""
        self._advance(MigrationStep.PRECOPYING)
        limit, settings = self._limits.precopy, self._context.cluster.precopy
        found, within = self.predicted, self._within()
        sooner = 0.0
        if within is not None and found is not None:  # no round after this, to pause in time
            sooner = max(LEAST_PRECOPY_S, within - found.seconds - ENDING_S)
        precopy = messages.StartPrecopy(
            self.name,
            self.capsule.name,
            self.destination,
            reserved.endpoint,
            limit - self._limits.suspicion,
            reserved.plain,
            self.order.verify,
            reserved.full_dump,
            self.order.copy_way or settings.way.value,
            found.given if found is not None else None,
            max_pause(settings, self._limits),
            within or 0.0,
            sooner,
        )
        began = time.monotonic()
        moved = await self._request(self.source, precopy, limit, messages.Moved)
        self.times.add(moved.phases, began)
        self._note_full_dump(moved.phases)
        if moved.chosen is not None and self.predicted is not None:
            self.predicted = decided(self.predicted, moved.chosen)
        known = self._inspected.outside if self._inspected is not None else []
        if breaks := what_breaks([each for each in moved.outside if each not in known], "new"):
            self._context.note(self, breaks)
        if self.predicted is not None and self.precopy is not None:
            self.predicted = sharpened(self.predicted, self.precopy)

    async def _place_ahead(self) -> None:
        """Let the destination prefill cold memory while the job trains and the source keeps sending
        rounds; or let it free memory for the pages of a stop. This may take as long as the
        phases before it took, plus PLACE_LEAST_S."""
        if self.precopy is None:
            return
        began = time.monotonic()
        until = began + PLACE_LEAST_S + sum(p.seconds for p in self.times.phases)
        until = min(until, self._pause_by)
        with self.times.phase("place ahead") as detail:
            stop = 0 if self.precopy.bytes else self.precopy.left
            while (seen := await self._placed(stop, until)).placing:
                if time.monotonic() > until:
                    break
                await asyncio.sleep(PLACE_POLL_S)
            room = f"room for {units.size(stop)}"
            detail.append(room if stop else f"{units.size(seen.placed)} of cold memory")

    @property
    def _pause_by(self) -> float:
        if self.until is None or self.predicted is None:
            return super()._pause_by
        return self.until - self.predicted.seconds - ENDING_S

    def _within(self) -> float | None:
        """Return the seconds until the capsule must be gone; None without a deadline."""
        return None if self.until is None else max(0.1, self.until - time.monotonic())

    def _note_if_late(self, found: messages.Prediction) -> None:
        """Note in the history that the capsule will be gone too late; it moves anyway."""
        if found.needs_s is not None and (within := self._within()) is not None:
            self._context.note(self, too_late(found.needs_s, within))

    def _check_time(self) -> None:
        """Raise StepFailed if the rest of the memory cannot be sent in time: the move would be
        undone at the deadline of the pause, and the pause would have been for nothing."""
        if self.precopy is not None:
            check_freeze(self._limits, self.precopy, self._left_s)

    async def _placed(self, stop: int, until: float) -> messages.Arrived:
        """Ask how far that is. The job trains on, so a busy destination has time for its answer."""
        limit = min(self._limits.prepare, until - time.monotonic())
        limit = max(self._limits.suspicion, limit)
        progress = messages.Progress(self.name, close=False, stop=stop)
        return await self._request(self.destination, progress, limit, messages.Arrived)

    async def _progress(self, close: bool) -> messages.Arrived:
        """Ask the destination how much of the image it has."""
        progress = messages.Progress(self.name, close)
        return await self._request(
            self.destination, progress, self._limits.suspicion, messages.Arrived
        )


def reserve_request(
    name: str,
    order: Order,
    inspected: messages.Inspected,
    source: str,
    cluster: Cluster,
    wanted: Sequence[tuple[str, str]] = (),
    *,
    dry_run: bool = False,
) -> messages.Reserve:
    """Return the request to a destination to check the capsule and, unless this is a ``dry_run``,
    to make room for it.

    ``name``: of the migration. ``source``: the host that will send the image. ``wanted``: what
    :func:`gpus_wanted` returned, for the destination that the order names.
    """
    job, capsule = order.job, order.capsule
    return messages.Reserve(
        name,
        job.spec(capsule, cluster),
        inspected.survey,
        inspected.facts,
        source,
        capsule.epoch + 1,
        job.book(),
        limit_bytes(inspected),
        dry_run=dry_run,
        gpu=inspected.gpu,
        gpus_wanted=list(wanted),
        full_dump=inspected.full_dump,
    )


def gpus_wanted(order: Order, inspected: messages.Inspected) -> list[tuple[str, str]]:
    """Return the pair (GPU to leave, GPU to use) of an order that names a GPU; else no pair.

    The planner has put the UUID of the GPU to use into the order (planning.py).
    """
    if order.gpu is None:
        return []
    return [(left(order.capsule.name, inspected.gpu, order.gpu.leave), order.gpu.gpu)]
