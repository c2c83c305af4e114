# SPDX-License-Identifier: Apache-2.0
"""What a taint sets in motion: everything on a tainted host moves to a spare, one by one.

One move at a time for each tainted host keeps its link for one image, and a job from standing
still in two places; only where the host must be empty soon all may move at once
(evacuation_plan.py). A capsule that could not move is tried again when something has changed
(a host came, a slot was freed, the taint was renewed) and after a while in any case.

Where the cause lies in the capsule itself, no other host helps. If the survey found it, before
anything was copied, the capsule is surveyed again after a while, which doubles each time. If a dump
or a restore failed for it, with its pre-copy, it is tried again after a while as well. If that
fails with the same words, the next attempt comes late, or when a person asks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from ...errors import AT_SOURCE, LiveshiftError, SourceRefused, Unreachable
from .. import messages
from ..cost.model import max_pause
from ..cost.words import too_late
from ..migration.before_pause import BeforePause
from ..migration.story import Story
from ..model.jobs import Capsule
from .evacuation_plan import EvacuationPlan
from .evacuation_plan import plan as make_plan
from .fleet import Fleet
from .moves import Moves

RETRY_S = 30.0
AT_MOST_S = 600.0
"""Between two attempts, where the cause of the failure is in the capsule itself."""
TICK_S = 1.0
PLAN_LEAST_S = 3.0
"""Seconds that the hosts get to answer for a plan, however near the deadline is."""


class Evacuation:
    """Watches taints and begins moves until tainted hosts are empty."""

    def __init__(self, fleet: Fleet, moves: Moves) -> None:
        self._fleet = fleet
        self._moves = moves
        self._plans: dict[str, EvacuationPlan] = {}  # of hosts that must be empty soon
        self._planning: Counter[str] = Counter()  # by host: plans that are being made
        self._wake = asyncio.Event()
        self._not_before: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self._begun: dict[str, Story] = {}  # by capsule: the last move that was begun here
        self._failures: dict[str, int] = {}  # by capsule, in a row, each with its cause there
        self._failed: dict[str, str] = {}  # by capsule: the words of the last one

    def wake(self) -> None:
        """Something has changed: look again now."""
        self._wake.set()

    def retry(self, host: str) -> None:
        """A person asked (again) for this host: forget what failed before."""
        for job in self._fleet.jobs.values():
            for capsule in job.capsules.values():
                if capsule.host == host:
                    self._not_before.pop(capsule.name, None)
                    self._refused.pop(capsule.name, None)
                    self._begun.pop(capsule.name, None)
                    self._failures.pop(capsule.name, None)
                    self._failed.pop(capsule.name, None)
        self.wake()

    async def plan(self, host: str, within: float) -> messages.Evacuating:
        """Plan how the capsules leave a host that must be empty within so many seconds.

        No move of the host begins before the plan is made. A capsule that cannot leave is named
        with the reason.
        """
        began = time.monotonic()
        await self._tell_moving(host, began + within)
        leaving = [
            (job, capsule)
            for job in self._fleet.jobs.values()
            for capsule in job.capsules.values()
            if capsule.host == host and capsule.code is None and not capsule.migration
        ]
        self._planning[host] += 1
        try:
            plans = (self._moves.plan(job, each, "", watch=False) for job, each in leaving)
            found = await asyncio.gather(*(_soon(plan, within) for plan in plans))
        finally:
            self._planning[host] -= 1
            self.wake()
        known = {
            each.name: seen.prediction
            for (_, each), seen in zip(leaving, found, strict=True)
            if isinstance(seen, messages.Planned) and seen.prediction is not None
        }
        cluster = self._fleet.cluster
        left = within - (time.monotonic() - began)
        plan = make_plan(known, left, max_pause(cluster.precopy, cluster.timeouts))
        self._plans[host] = plan
        unable = [
            messages.Departing(each.name, 0.0, True, error=str(seen))
            for (_, each), seen in zip(leaving, found, strict=True)
            if isinstance(seen, LiveshiftError)
        ]
        for late in plan.late:
            by = self._fleet.taints.get(host, ("", ""))[1]
            self._fleet.journal.note(late.capsule, "late", too_late(late.empty_s, left), by)
        return messages.Evacuating(
            host, within, plan.empty_s, plan.together, [*plan.departing, *unable]
        )

    async def _tell_moving(self, host: str, until: float) -> None:
        """Give the deadline to the moves that began to leave the host without it."""
        moving = [move for move in self._fleet.under_way() if move.source == host]
        leaving = [move for move in moving if isinstance(move, BeforePause)]
        await asyncio.gather(*(move.end_sooner(until) for move in leaving))

    def _until(self, host: str, capsule: str) -> float | None:
        """The monotonic time by which the capsule must be gone; None without a deadline."""
        deadline = self._fleet.deadlines.get(host)
        if deadline is None:
            return None
        left, plan = deadline - time.time(), self._plans.get(host)
        if plan is not None and capsule in plan.until:
            left -= plan.within - plan.until[capsule]
        return time.monotonic() + left

    def leave(self, capsule: Capsule) -> None:
        """Somebody has cancelled its move: it is left alone until its host is tainted anew."""
        self._not_before[capsule.name] = float("inf")

    async def run(self) -> None:
        while True:
            for host in list(self._fleet.taints):
                self._next(host)
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            except TimeoutError:
                continue

    def _next(self, host: str) -> None:
        if host not in self._fleet.deadlines:
            self._plans.pop(host, None)
        plan = self._plans.get(host, EvacuationPlan())
        moving = any(move.source == host for move in self._fleet.under_way())
        if self._planning[host] or (moving and not plan.together):
            return
        reason, by = self._fleet.taints[host]
        places = {name: place for place, name in enumerate(plan.order)}
        running = [job for job in self._fleet.jobs.values() if job.state == "running"]
        each = [(job, capsule) for job in running for capsule in job.capsules.values()]
        each.sort(key=lambda one: places.get(one[1].name, len(places)))
        for job, capsule in each:
            if capsule.host != host or capsule.code is not None or capsule.migration:
                continue
            self._learn(capsule, by)
            if time.monotonic() < self._not_before.get(capsule.name, 0.0):
                continue
            try:
                self._begun[capsule.name] = self._moves.start(
                    job, capsule, "", f"{host} is tainted: {reason}", by,
                    until=self._until(host, capsule.name),
                )  # fmt: skip
            except LiveshiftError as error:
                if self._refused.get(capsule.name) != str(error):  # said once
                    self._refused[capsule.name] = str(error)
                    hint = f" ({error.hint})" if error.hint else ""
                    self._fleet.journal.note(capsule.name, "not moved", f"{error}{hint}", by)
                continue
            if not self._failures.get(capsule.name):
                self._refused.pop(capsule.name, None)
            self._not_before[capsule.name] = time.monotonic() + RETRY_S  # should it fail
            if not plan.together:
                return

    def _learn(self, capsule: Capsule, by: str) -> None:
        """Its last move from here has ended: when the next one may begin."""
        move = self._begun.pop(capsule.name, None)
        if move is None:
            return
        before = self._failed.pop(capsule.name, None)
        if not isinstance(move.error, AT_SOURCE):
            return
        failures = self._failures[capsule.name] = self._failures.get(capsule.name, 0) + 1
        said = self._failed[capsule.name] = str(move.error)
        if isinstance(move.error, SourceRefused):
            wait = min(AT_MOST_S, RETRY_S * 2**failures)
        else:
            wait = AT_MOST_S if said == before else RETRY_S
            said += f" ({wait:g} s)"
        self._not_before[capsule.name] = time.monotonic() + wait
        if self._refused.get(capsule.name) != said:  # once
            self._refused[capsule.name] = said
            words = f"no other host is tried for {wait:.0f} s, as the cause is in it: {move.error}"
            hint = f" (`liveshift migrate {capsule.name}` tries again now)"
            self._fleet.journal.note(capsule.name, "not moved", words + hint, by)


async def _soon(
    plan: Coroutine[Any, Any, messages.Planned], within: float
) -> messages.Planned | LiveshiftError:
    """The plan of one move, or why there is none. At most half of the time goes into planning;
    the rest is for the moves."""
    try:
        return await asyncio.wait_for(plan, max(PLAN_LEAST_S, within / 2))
    except TimeoutError:
        return Unreachable("its hosts did not answer in time")
    except LiveshiftError as error:
        return error
