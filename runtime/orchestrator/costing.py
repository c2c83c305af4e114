# SPDX-License-Identifier: Apache-2.0
"""Measures what a move costs: asks source and destination, and makes the record.

Neither the move nor the evacuation waits for this. The move begins while the source still answers
how far the capsule is. Both hosts report the job's progress only after the move has ended, so the
record comes some seconds later. If the job ends by then, or another of its capsules moves, the cost
is not known, and the record says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from ...errors import LiveshiftError
from .. import messages
from ..cost.lost_time import AFTER_S, NotMeasured, lost_s
from ..cost.prediction import stood
from ..cost.words import in_words
from ..messages import Cost, Message, Worked
from ..migration.host_migration import HostMigration
from ..model.steps import ENDS, MigrationStep
from .fleet import Fleet

log = logging.getLogger("liveshift.costing")

ASK_S = 5.0
WATCHED_S = 30.0
"""A host may take this long to answer EndMeasure: it first watches the capsule for some seconds."""

Ask = Callable[[str, Message, float], Awaitable[Message | None]]


class Costing:
    """Measures moves. ``ask`` is Moves.ask. Once a move's cost is set, it calls ``measured`` with
    the move and a line for the history ("" for no line)."""

    def __init__(
        self, fleet: Fleet, ask: Ask, measured: Callable[[HostMigration, str], None]
    ) -> None:
        self._fleet = fleet
        self._ask = ask
        self._measured = measured
        self._begun: dict[str, float] = {}  # by move: when its source was asked

    async def begin(self, move: HostMigration) -> None:
        """Ask the source, at the begin of a move, how far the capsule is."""
        asked = time.monotonic()
        try:
            await self._ask(move.source, messages.StartMeasure(move.name, move.capsule.name), ASK_S)
        except LiveshiftError as error:
            log.info("%s: what it costs will not be measured: %s", move.name, error)
            return
        if move.step not in ENDS:  # else :meth:`end` has run, and nothing would remove the entry
            self._begun[move.name] = (asked + time.monotonic()) / 2

    async def end(self, move: HostMigration) -> None:
        """Set the cost of a move that is over, unless it ended before it copied anything."""
        begun = self._begun.pop(move.name, None)
        if not _did_something(move):
            return
        source = destination = None
        lost, why_not = None, ""
        try:
            if begun is None:
                raise NotMeasured("the orchestrator or the source was not there at its begin")
            if move.step in (MigrationStep.LOST, MigrationStep.JOB_ENDED):
                raise NotMeasured("the job ended")
            source, destination, asked = await self._ask_both(move)
            end = source if move.step is not MigrationStep.DONE else destination
            log.debug("%s: begun %.3f s before; %s; %s", move.name, asked - begun, source, end)
            self._look_for_others(move)
            lost = lost_s(asked - begun + end.seconds, source, end)
        except NotMeasured as error:
            why_not = str(error)
        except LiveshiftError as error:
            why_not = f"a host did not say what the job made: {error}"
        move.cost = _cost(move, lost, why_not, source, destination)
        self._measured(move, in_words(move.cost) if move.step is MigrationStep.DONE else "")

    async def _ask_both(self, move: HostMigration) -> tuple[Worked, Worked, float]:
        """Return the answers of source and destination, and when we asked the capsule's host."""
        name, capsule = move.name, move.capsule.name
        if move.step is not MigrationStep.DONE:  # it runs on at the source
            asked = time.monotonic()
            source = await self._worked(move.source, messages.EndMeasure(name, capsule))
            return source, source, asked
        source = await self._worked(move.source, messages.EndMeasure(name, capsule))
        asked = time.monotonic()
        ask = messages.EndMeasure(name, capsule, source.clock)
        return source, await self._worked(move.destination, ask), asked

    async def _worked(self, host: str, ask: messages.EndMeasure) -> Worked:
        answer = await self._ask(host, ask, WATCHED_S)
        if not isinstance(answer, Worked):
            raise LiveshiftError(f"{host} answered EndMeasure with {answer!r}")
        return answer

    def _look_for_others(self, move: HostMigration) -> None:
        """Raise NotMeasured if another move of the job overlaps in time, or the job has ended."""
        for other in self._fleet.moves.values():
            if other is move or other.job is not move.job:
                continue
            ended = other.times.ended
            if ended is None or ended + AFTER_S > move.times.began:
                raise NotMeasured(f"another move of the job, {other.name}, lies in the same time")
        if move.capsule.code is not None or move.job.state != "running":
            raise NotMeasured("the job ended")


def _did_something(move: HostMigration) -> bool:
    """Return whether the move was done, or at least began to copy or to freeze."""
    began = (phase.name == "pre-copy" or phase.frozen for phase in move.times.phases)
    return move.step is MigrationStep.DONE or any(began)


def _cost(
    move: HostMigration,
    lost: float | None,
    why_not: str,
    source: Worked | None,
    destination: Worked | None,
) -> Cost:
    row, slower, paused = move.row(), None, None
    if lost is not None:
        # A frozen job makes no progress, so the loss is at least the frozen time. The rate is known
        # to a few per cent only; over a move of 30 s that error can exceed a short pause.
        lost = max(lost, row.frozen_s)
        slower = max(0.0, lost - stood(row))
        paused = lost - slower
    left = move.step is MigrationStep.DONE and not any(
        phase.name == "finish" and phase.detail for phase in row.phases
    )
    return Cost(
        lost_s=lost,
        paused_s=paused,
        slower_s=slower,
        empty_s=row.seconds if left else None,
        cpu_source_s=source.cpu_s if source else None,
        cpu_destination_s=destination.cpu_s if destination and destination is not source else None,
        sent_bytes=source.sent if source else 0,
        memory_bytes=row.predicted.memory if row.predicted else 0,
        why_not=why_not,
    )
