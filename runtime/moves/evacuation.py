# SPDX-License-Identifier: Apache-2.0
"""Evacuation: moves every capsule of a tainted host to a spare, one by one.

A tainted host has one move at a time. So one image has the whole link, and a job is not paused in
two places. Only if the host must be empty soon may all capsules move at once
(cost/evacuation_plan.py).

A capsule that could not move is tried again when something has changed (a host came, a slot became
free, the taint was renewed), and after RETRY_S in any case. If no spare could take it, only such a
change counts, not each look: in a full cluster of a thousand hosts hundreds of capsules may wait.

If the cause of a failure is in the capsule itself, no other host helps. If the survey found the
cause, nothing was copied: the next attempt comes after a wait that doubles each time. If a dump or
restore failed, a whole pre-copy was lost: the next attempt comes after RETRY_S, or after AT_MOST_S
if the last two failures had the same words. A person can ask for an earlier attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ...errors import AT_SOURCE, LiveshiftError, NoSpare, SourceRefused, Unreachable
from .. import messages
from ..cost.evacuation_plan import EvacuationPlan
from ..cost.evacuation_plan import plan as make_plan
from ..cost.model import max_pause
from ..cost.words import too_late
from ..fleet.fleet import Fleet
from ..migration.before_pause import BeforePause
from ..migration.migration import Migration
from ..migration.order import Order
from ..model.jobs import Capsule, Job
from ..model.steps import MigrationStep
from .migration_service import MigrationService
from .planning import MigrationPlanner

RETRY_S = 30.0
AT_MOST_S = 600.0
"""The longest wait, in seconds, between two attempts if the cause of failure is in the capsule."""
TICK_S = 1.0
PLAN_LEAST_S = 3.0
"""The hosts have at least this many seconds to answer for a plan, even close to the deadline."""


@dataclass
class _Attempts:
    """What the attempts to move one capsule away have come to."""

    begun: Migration | None = None
    """The last migration that was begun here; None once :meth:`Evacuation._learn_from_failure` has
    read its end."""
    not_before: float = 0.0
    """The monotonic time of the next attempt."""
    noted: set[str] = field(default_factory=set)
    """The reasons that were noted in the history since the last move. Each is noted once."""
    no_spare: bool = False
    """The last attempt found no host that can take the capsule."""
    failures: int = 0
    """Failures in a row with the cause in the capsule."""
    failed: str = ""
    """The message of the last such failure."""


class Evacuation:
    """The orchestrator has one instance, which begins the moves off all tainted hosts. Its task
    ``run`` looks at these hosts every TICK_S seconds, and at once after ``wake``. The history of a
    capsule says why it could not move."""

    def __init__(
        self, fleet: Fleet, planner: MigrationPlanner, migrations: MigrationService
    ) -> None:
        self._fleet = fleet
        self._planner = planner
        self._migrations = migrations
        self._plans: dict[str, EvacuationPlan] = {}  # by host; only hosts that have a deadline
        self._planning: Counter[str] = Counter()  # by host: how many plans are being made
        self._wake = asyncio.Event()
        self._attempts: dict[str, _Attempts] = {}  # by capsule
        self._room: dict[str, tuple[int, int, int]] = {}  # by host, as :func:`_room` saw it last

    def wake(self) -> None:
        """Make :meth:`run` look again now, because something has changed."""
        self._wake.set()

    def retry(self, host: str) -> None:
        """Forget earlier failures on this host, because a person asked (again) to empty it."""
        for _, capsule in self._on(host):
            self._attempts.pop(capsule.name, None)
        self.wake()

    async def plan(self, host: str, within: float) -> messages.Evacuating:
        """Plan how the capsules leave a host that must be empty ``within`` seconds from now.

        No move of the host begins before the plan is made. The plan names each capsule that cannot
        leave, with the reason.
        """
        began = time.monotonic()
        await self._apply_deadline(host, began + within)
        self._planning[host] += 1
        try:
            plan, unable = await self._made_plan(host, within, began)
        finally:
            self._planning[host] -= 1
            self.wake()
        self._plans[host] = plan
        left = within - (time.monotonic() - began)
        for late in plan.late:
            by = self._fleet.taints.get(host, ("", ""))[1]
            self._fleet.journal.note(late.capsule, "late", too_late(late.at_most_s, left), by)
        return _told(host, within, plan, unable)

    async def forecast(self, host: str, within: float) -> messages.Evacuating:
        """Plan the same for a host that may not be tainted; changes nothing. ``within``: 0 for a
        host without a deadline."""
        plan, unable = await self._made_plan(host, within or math.inf, time.monotonic())
        if not within:  # nobody knows how long these moves still take
            on_its_way = "it is being moved already"
            moving = (each.name for _, each in self._on(host) if each.migration)
            unable += [messages.Departing(n, 0.0, False, error=on_its_way) for n in moving]
        return _told(host, within, plan, unable)

    async def _made_plan(
        self, host: str, within: float, began: float
    ) -> tuple[EvacuationPlan, list[messages.Departing]]:
        """The plan for the capsules that can leave, and those that cannot. ``began``: the moment
        from which ``within`` counts."""
        leaving = [(job, each) for job, each in self._on(host) if not each.migration]
        plans = (self._planner.plan(Order(job, each), watch=False) for job, each in leaving)
        found = await asyncio.gather(*(_soon(plan, within) for plan in plans))
        known = {
            each.name: seen.prediction
            for (_, each), seen in zip(leaving, found, strict=True)
            if isinstance(seen, messages.Planned) and seen.prediction is not None
        }
        cluster = self._fleet.cluster
        left = within - (time.monotonic() - began)
        unable = [
            messages.Departing(each.name, 0.0, within < math.inf, error=str(seen))
            for (_, each), seen in zip(leaving, found, strict=True)
            if isinstance(seen, LiveshiftError)
        ]
        return make_plan(known, left, max_pause(cluster.precopy, cluster.timeouts)), unable

    async def _apply_deadline(self, host: str, until: float) -> None:
        """Give the deadline to the moves that began to leave the host without it."""
        moving = [each for each in self._fleet.under_way() if each.source == host]
        leaving = [each for each in moving if isinstance(each, BeforePause)]
        await asyncio.gather(*(each.end_sooner(until) for each in leaving))

    def _until(self, host: str, capsule: str) -> float | None:
        """Return the monotonic time by which the capsule must be gone; None without a deadline."""
        deadline = self._fleet.deadlines.get(host)
        if deadline is None:
            return None
        plan = self._plans.get(host)
        if plan is not None and capsule in plan.until:
            return deadline - (plan.within - plan.until[capsule])
        return deadline

    def leave(self, capsule: Capsule) -> None:
        """Leave a capsule alone until its host is tainted again: a person cancelled its move."""
        attempts = self._attempts.setdefault(capsule.name, _Attempts())
        attempts.not_before, attempts.no_spare = float("inf"), False

    async def run(self) -> None:
        while True:
            self._wake.clear()
            self._forget_over()
            if self._fleet.taints:
                self._note_room()
            for host in list(self._fleet.taints):
                if host in self._fleet.taints:
                    self._start_next(host)
                await asyncio.sleep(0)  # heartbeats are read between two hosts
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()

    def _note_room(self) -> None:
        """Let the capsules try again for which there was no spare, if a host has room now that it
        did not have at the last look."""
        before, self._room = self._room, _room(self._fleet)
        none = (0, 0, 0)
        pairs = ((room, before.get(host, none)) for host, room in self._room.items())
        if any(new > old for room, had in pairs for new, old in zip(room, had, strict=True)):
            for attempts in self._attempts.values():
                if attempts.no_spare:
                    attempts.not_before = 0.0

    def _on(self, host: str) -> list[tuple[Job, Capsule]]:
        return [(job, each) for job, each in self._fleet.living() if each.host == host]

    def _forget_over(self) -> None:
        """Forget the attempts of capsules that have moved, have ended, or are gone."""
        for name, attempts in list(self._attempts.items()):
            found = self._fleet.find(name)
            moved = attempts.begun is not None and attempts.begun.step is MigrationStep.DONE
            if moved or found is None or found[1].code is not None:
                del self._attempts[name]

    def _start_next(self, host: str) -> None:
        if host not in self._fleet.deadlines:
            self._plans.pop(host, None)
        plan = self._plans.get(host, EvacuationPlan())
        moving = any(each.source == host for each in self._fleet.under_way())
        if self._planning[host] or (moving and not plan.together):
            return
        reason, by = self._fleet.taints[host]
        places = {name: place for place, name in enumerate(plan.order)}
        each = sorted(self._on(host), key=lambda one: places.get(one[1].name, len(places)))
        for job, capsule in each:
            if job.state != "running" or capsule.migration:
                continue
            attempts = self._attempts.setdefault(capsule.name, _Attempts())
            self._learn_from_failure(capsule, attempts, by)
            if time.monotonic() < attempts.not_before:
                continue
            try:
                why, until = f"{host} is tainted: {reason}", self._until(host, capsule.name)
                order = Order(job, capsule, reason=why, by=by, until=until)
                attempts.begun = self._migrations.start(order)
            except LiveshiftError as error:
                # Which hosts have a reason changes with each host that comes or goes.
                alike = error.kinds if isinstance(error, NoSpare) else str(error)
                if alike not in attempts.noted:
                    attempts.noted.add(alike)
                    hint = f" ({error.hint})" if error.hint else ""
                    self._fleet.journal.note(capsule.name, "not moved", f"{error}{hint}", by)
                attempts.no_spare = isinstance(error, NoSpare)
                if attempts.no_spare:
                    attempts.not_before = time.monotonic() + RETRY_S
                continue
            attempts.no_spare = False
            if not attempts.failures:
                attempts.noted.clear()
            attempts.not_before = time.monotonic() + RETRY_S  # counts if the move fails
            if not plan.together:
                return

    def _learn_from_failure(self, capsule: Capsule, attempts: _Attempts, by: str) -> None:
        """Set when the capsule's next move may begin, if its last move from here has failed."""
        migration, attempts.begun = attempts.begun, None
        if migration is None:
            return
        before, attempts.failed = attempts.failed, ""
        if not isinstance(migration.error, AT_SOURCE):
            return
        attempts.failures += 1
        text = attempts.failed = str(migration.error)
        if isinstance(migration.error, SourceRefused):
            wait = min(AT_MOST_S, RETRY_S * 2**attempts.failures)
        else:
            wait = AT_MOST_S if text == before else RETRY_S
            text += f" ({wait:g} s)"
        attempts.not_before = time.monotonic() + wait
        if text not in attempts.noted:
            attempts.noted = {text}
            cause = f"the cause is in it: {migration.error}"
            text = f"no other host is tried for {wait:.0f} s, as {cause}"
            hint = f" (`liveshift migrate {capsule.name}` tries again now)"
            self._fleet.journal.note(capsule.name, "not moved", text + hint, by)


def _room(fleet: Fleet) -> dict[str, tuple[int, int, int]]:
    """Return the free slots, the free GPUs and the GPUs of each host that may get capsules."""
    return {
        view.name: (view.free, sum(seat.free for seat in view.gpus), len(view.gpus))
        for view in fleet.views()
        if view.takes_work and view.spare != "none"
    }


def _told(
    host: str, within: float, plan: EvacuationPlan, unable: list[messages.Departing]
) -> messages.Evacuating:
    return messages.Evacuating(
        host, within, plan.empty_s, plan.together, [*plan.departing, *unable]
    )


async def _soon(
    plan: Coroutine[Any, Any, messages.Planned], within: float
) -> messages.Planned | LiveshiftError:
    """Return the plan of one move, or the error that says why there is none. Planning may take half
    of the time (at least PLAN_LEAST_S); the rest is for the moves. Nobody waits for longer than
    PLAN_LEAST_S if there is no deadline."""
    longest = PLAN_LEAST_S if within == math.inf else max(PLAN_LEAST_S, within / 2)
    try:
        async with asyncio.timeout(longest):
            return await plan
    except TimeoutError:
        return Unreachable("its hosts did not answer in time")
    except LiveshiftError as error:
        return error
