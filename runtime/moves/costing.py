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
from collections.abc import Callable

from ...errors import LiveshiftError
from .. import messages
from ..cost.lost_time import AFTER_S, NotMeasured, lost_s
from ..cost.prediction import stood
from ..cost.words import in_words
from ..fleet.agents import Agents
from ..fleet.fleet import Fleet
from ..messages import Cost, Worked
from ..messages.answers import expected
from ..migration.host_migration import HostMigration
from ..model.steps import ENDS, MigrationStep

log = logging.getLogger("liveshift.costing")

REQUEST_S = 5.0
WATCHED_S = 30.0
"""A host may take this long to answer EndMeasure: it first watches the capsule for some seconds."""


class Costing:
    """Measures migrations. Once a migration's cost is set, this calls ``on_cost`` with the
    migration and a line for the history ("" for no line)."""

    def __init__(
        self, fleet: Fleet, agents: Agents, on_cost: Callable[[HostMigration, str], None]
    ) -> None:
        self._fleet = fleet
        self._agents = agents
        self._on_cost = on_cost
        self._begun: dict[str, float] = {}  # by migration: when its source was asked

    async def begin(self, migration: HostMigration) -> None:
        """Ask the source, at the begin of a migration, how far the capsule is."""
        asked = time.monotonic()
        try:
            start = messages.StartMeasure(migration.name, migration.capsule.name)
            await self._agents.request(migration.source, start, REQUEST_S)
        except LiveshiftError as error:
            log.info("%s: what it costs will not be measured: %s", migration.name, error)
            return
        if migration.step not in ENDS:  # else :meth:`end` has run: nothing would remove the entry
            self._begun[migration.name] = (asked + time.monotonic()) / 2

    async def end(self, migration: HostMigration) -> None:
        """Set the cost of a migration that is over, unless it ended before it copied anything."""
        begun = self._begun.pop(migration.name, None)
        if not _did_something(migration):
            return
        source = destination = None
        lost, why_not = None, ""
        try:
            if begun is None:
                raise NotMeasured("the orchestrator or the source was not there at its begin")
            if migration.step in (MigrationStep.LOST, MigrationStep.JOB_ENDED):
                raise NotMeasured("the job ended")
            if migration.step is MigrationStep.REWOUND:
                raise NotMeasured("the job went back to a snapshot")
            source, destination, asked = await self._both_answers(migration)
            end = source if migration.step is not MigrationStep.DONE else destination
            ago = asked - begun
            log.debug("%s: begun %.3f s before; %s; %s", migration.name, ago, source, end)
            self._check_alone(migration)
            lost = lost_s(ago + end.seconds, source, end)
        except NotMeasured as error:
            why_not = str(error)
        except LiveshiftError as error:
            why_not = f"a host did not say what the job made: {error}"
        migration.cost = _cost(migration, lost, why_not, source, destination)
        done = migration.step is MigrationStep.DONE
        self._on_cost(migration, in_words(migration.cost, migration.predicted) if done else "")

    async def _both_answers(self, migration: HostMigration) -> tuple[Worked, Worked, float]:
        """Return the answers of source and destination, and when we asked the capsule's host."""
        name, capsule = migration.name, migration.capsule.name
        asked = time.monotonic()
        source = await self._worked(migration.source, messages.EndMeasure(name, capsule))
        if migration.step is not MigrationStep.DONE:  # it runs on at the source
            return source, source, asked
        asked = time.monotonic()
        measure = messages.EndMeasure(name, capsule, source.clock)
        return source, await self._worked(migration.destination, measure), asked

    async def _worked(self, host: str, measure: messages.EndMeasure) -> Worked:
        answer = await self._agents.request(host, measure, WATCHED_S)
        return expected(Worked, host, measure, answer)

    def _check_alone(self, migration: HostMigration) -> None:
        """Raise NotMeasured if another move of the job overlaps in time, or the job has ended."""
        for other in self._fleet.migrations.values():
            if other is migration or other.job is not migration.job:
                continue
            ended = other.times.ended
            if ended is None or ended + AFTER_S > migration.times.began:
                raise NotMeasured(f"another move of the job, {other.name}, lies in the same time")
        if migration.capsule.code is not None or migration.job.state != "running":
            raise NotMeasured("the job ended")


def _did_something(migration: HostMigration) -> bool:
    """Return whether the move was done, or at least began to copy or to freeze."""
    began = (phase.name == "pre-copy" or phase.frozen for phase in migration.times.phases)
    return migration.step is MigrationStep.DONE or any(began)


def _cost(
    migration: HostMigration,
    lost: float | None,
    why_not: str,
    source: Worked | None,
    destination: Worked | None,
) -> Cost:
    row, slower, paused = migration.row(), None, None
    if lost is not None:
        # A frozen job makes no progress, so the loss is at least the frozen time. The rate is known
        # to a few per cent only; over a move of 30 s that error can exceed a short pause.
        lost = max(lost, row.frozen_s)
        slower = max(0.0, lost - stood(row))
        paused = lost - slower
    left = migration.step is MigrationStep.DONE and not any(
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
