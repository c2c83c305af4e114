# SPDX-License-Identifier: Apache-2.0
"""The agent's part in measuring what a move costs (lost_time.py): it reads the capsule's clock.

The source notes the capsule's count when the orchestrator asks for a move, and its run time when
the capsule stops there. The destination notes the count when the capsule begins to run there. After
the move, the host that has the capsule watches its clock for some seconds. No move waits for this.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from ... import messages
from ...cost.lost_time import (
    AFTER_S,
    CHANGES,
    COLLECTIVES,
    NOT_SEEN,
    RUN_TIME,
    SURE,
    WATCH_MOST_S,
    WATCH_S,
    NotMeasured,
    level,
)
from .capsule_table import CapsuleTable
from .running_capsule import RunningCapsule

LOOK_S = 0.05
KEPT = 200
"""The agent remembers at most this many moves. The orchestrator never asks about some of them: they
copied nothing, or that orchestrator has ended."""


@dataclass
class _Part:
    """A move as this host saw it; the counts are those of ``clock``."""

    cpu: float  # CPU seconds of this agent when the move began here
    resident: RunningCapsule | None = None
    clock: str = ""
    rate: float = 0.0
    begin: float = 0.0
    counted: float = 0.0
    at_restore: int = 0  # collectives, when the capsule began to run here
    stopped: float | None = None
    sent: int = 0
    leaves: bool = False
    why_not: str = ""


class Measures:
    """Answers StartMeasure and EndMeasure."""

    def __init__(self, capsule_table: CapsuleTable) -> None:
        self._capsule_table = capsule_table
        self._parts: dict[str, _Part] = {}

    async def start_measure(self, request: messages.StartMeasure) -> None:
        """A move of a capsule on this host begins: note the capsule's count."""
        now, cpu = time.monotonic(), cpu_s()
        resident = self._capsule_table.resident(request.capsule)
        part = self._part(request.migration, cpu)
        part.resident, part.leaves = resident, True
        part.clock, usual = COLLECTIVES, resident.rate
        if not usual.typical():
            part.clock, usual = RUN_TIME, resident.computes
        part.rate = usual.typical()
        begin = usual.level(now)
        if begin is None:
            part.why_not = "it had not trained long enough before the move to tell how fast it is"
            return
        part.begin = begin
        part.counted = await asyncio.to_thread(_reader(resident, part.clock))

    def arriving(self, migration: str) -> None:
        """This host expects the capsule: count CPU time from now on."""
        self._part(migration, cpu_s())

    def runs(self, migration: str, resident: RunningCapsule) -> None:
        """The capsule runs here from now on: note its count. May block for some ms."""
        if (part := self._parts.get(migration)) is not None:
            part.resident = resident
            part.at_restore = max(resident.finished.values(), default=0)
            resident.run_time.progress(at_once=True)

    def stops(self, migration: str) -> None:
        """The capsule is about to be frozen here; may block for some ms."""
        part = self._parts.get(migration)
        if part is not None and part.clock == RUN_TIME and part.resident is not None:
            part.stopped = part.resident.run_time.progress(at_once=True)

    def sent(self, migration: str, size: int) -> None:
        """This host has sent ``size`` bytes in all for the move."""
        if (part := self._parts.get(migration)) is not None:
            part.sent = size

    async def end_measure(self, request: messages.EndMeasure) -> messages.Worked:
        """The move is over: return what was counted. Takes seconds if the capsule runs here."""
        part = self._parts.pop(request.migration, None)
        if part is None:
            why = f"the agent on {self._capsule_table.host} was restarted meanwhile"
            return messages.Worked("", 0.0, None, 0.0, 0.0, 0.0, 0.0, why_not=why)
        cpu, clock = cpu_s() - part.cpu, request.clock or part.clock
        if not part.leaves:
            part.begin = part.at_restore if clock == COLLECTIVES else 0.0
            part.counted = part.begin
        runs = self._capsule_table.capsules.get(request.capsule) is part.resident is not None
        end, seconds = part.stopped, 0.0
        if runs and part.leaves and end is not None:
            part.why_not = "it makes no collectives, was frozen and then went on where it was"
        elif runs and not part.why_not:
            try:
                end, seconds = await self._watch(part, clock)
            except NotMeasured as error:
                part.why_not = str(error)
        return messages.Worked(
            clock, part.begin, end, part.counted, part.rate, seconds, cpu, part.sent, part.why_not
        )

    async def _watch(self, part: _Part, clock: str) -> tuple[float, float]:
        """The count in the middle of some looks, and the seconds from the call to that moment."""
        resident = part.resident
        assert resident is not None
        read, asked = _reader(resident, clock), time.monotonic()
        await asyncio.sleep(AFTER_S)
        began, changes, looks = time.monotonic(), 0, list[tuple[float, float]]()
        while True:
            count = await asyncio.to_thread(read)
            now = time.monotonic()
            here = self._capsule_table.capsules.get(resident.spec.name) is resident
            if resident.code is not None or not here:
                raise NotMeasured(NOT_SEEN)
            changes += bool(looks and count != looks[-1][1])
            looks.append((now, count))
            if now - began >= (WATCH_S if changes >= CHANGES else WATCH_MOST_S):
                break
            await asyncio.sleep(LOOK_S)
        seen = level(looks)
        if not part.leaves and seen.changes >= SURE:
            part.rate = seen.rate
        return seen.count, seen.moment - asked

    def _part(self, migration: str, cpu: float) -> _Part:
        while len(self._parts) >= KEPT:
            del self._parts[next(iter(self._parts))]
        part = self._parts[migration] = _Part(cpu)
        return part


def _reader(resident: RunningCapsule, clock: str) -> Callable[[], int]:
    """A function that reads ``clock`` of the capsule; it may block for some ms."""
    return resident.collectives if clock == COLLECTIVES else resident.run_time.progress


def cpu_s() -> float:
    """CPU seconds of this process, all its threads, and of its children that have ended.

    Two moves at the same time both count the CPU time of both.
    """
    spent = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        spent += usage.ru_utime + usage.ru_stime
    return spent
