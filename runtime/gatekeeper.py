# SPDX-License-Identifier: Apache-2.0
"""A host's part in quiescing jobs: it keeps the gates of its capsules' processes.

Truth is in the pages: whether a gate is closed, and whether communicators are down, is read from
them, so that an agent that was started anew, or a host that a closed capsule has come to, can
open it. A gate is opened here unasked when it was closed for longer than agreed, or when the
orchestrator has been silent: a job whose communicators stand loses nothing by that. Where
communicators are down nobody can go on alone, and the gate stays closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import NotFound
from ..interposer.orders import OrderedPage
from . import messages, services
from .collective_clock import Report
from .host_gate import Debt, HostGate
from .house import House
from .rank_pages import members, ordered_pages

log = logging.getLogger("liveshift.gatekeeper")

POLL_S = 0.001
BEAT_S = 0.5


@dataclass
class Closed:
    """A job's gates, closed for one attempt; ``until`` on the monotonic clock."""

    attempt: int
    gate: HostGate
    pids: dict[OrderedPage, int]  # of their processes, as the host sees them
    until: float
    version: int = 0

    def fatal(self) -> list[str]:
        """Why this attempt cannot succeed."""
        return [f"{_who(o.rank, o.pid)}: {o.text}" for o in self.gate.obstacles() if o.fatal]


class Gatekeeper:
    """The gates of one host; ``silence`` says for how long the orchestrator has not been heard."""

    def __init__(self, house: House, silence: Callable[[], float]) -> None:
        self._house = house
        self._silence = silence
        self._closed: dict[str, Closed] = {}

    # ---- what the orchestrator asks ------------------------------------------------------------

    async def arm(self, ask: messages.Arm) -> messages.Armed:
        self._release(ask.job)
        closed = await asyncio.to_thread(self._close_gates, ask)
        self._closed[ask.job] = closed
        until = time.monotonic() + self._house.cluster.timeouts.suspicion / 2
        begun = closed.gate.announced()
        while begun is None and time.monotonic() < until:  # a group is being begun
            await asyncio.sleep(POLL_S)
            begun = closed.gate.announced()
        obstacles = closed.fatal()
        if begun is None:
            obstacles.append(f"{self._house.host}: a group of operations was begun and not ended")
        who = [member for page in closed.pids for member in members(page)]
        numbers, pairs = (dict(begun.numbers), dict(begun.pairs)) if begun else ({}, {})
        return messages.Armed(numbers, who, len(closed.pids), obstacles, pairs)

    def _close_gates(self, ask: messages.Arm) -> Closed:
        pids = dict(self._pages(ask.job))
        gate = HostGate(pids, lambda page: Path(f"/proc/{pids[page]}").exists())
        lease = 2 * self._house.cluster.timeouts.suspicion
        gate.arm(ask.attempt, int(1000 * lease), int(1000 * ask.limit))
        return Closed(ask.attempt, gate, pids, time.monotonic() + ask.hold)

    async def aim(self, ask: messages.Aim) -> messages.Aimed:
        closed = self._of(ask.job, ask.attempt)
        if ask.version > closed.version:
            closed.version = ask.version
            closed.gate.aim(ask.version, ask.targets, ask.pairs)
        until = time.monotonic() + ask.wait
        while True:
            seen = closed.gate.look()
            superseded = closed.version > ask.version or self._closed.get(ask.job) is not closed
            if seen.reached or seen.numbers or superseded or time.monotonic() > until:
                obstacles = [] if seen.reached else closed.fatal()
                return _aimed(seen, obstacles)
            await asyncio.sleep(POLL_S)

    async def shut(self, ask: messages.Shut) -> messages.Aimed:
        closed = self._of(ask.job, ask.attempt)
        closed.gate.close()
        seen = closed.gate.look()
        obstacles = closed.fatal()
        if seen.reached and not obstacles:
            obstacles = await services.drained(closed.pids, ask.attempt)
        return _aimed(seen, obstacles)

    async def who_owes(self, ask: messages.WhoOwes) -> messages.Owing:
        closed = self._of(ask.job, ask.attempt)
        debts = await asyncio.to_thread(closed.gate.debts, closed.pids.get)
        notes = [f"{_who(o.rank, o.pid)}: {o.text}" for o in closed.gate.obstacles()]
        return messages.Owing([_owes(debt) for debt in debts] + notes)

    async def tear_down(self, ask: messages.TearDown) -> messages.TornDown:
        async with self._all_pages(ask.job) as pages:
            return await services.torn_down(pages, ask.attempt)

    async def fresh_ids(self, ask: messages.FreshIds) -> messages.Fresh:
        async with self._all_pages(ask.job) as pages:
            return await services.fresh_ids(pages, ask.attempt)

    async def rebuild(self, ask: messages.Rebuild) -> messages.TornDown:
        async with self._all_pages(ask.job) as pages:
            return await services.rebuilt(pages, ask.attempt, ask.ids)

    async def open(self, ask: messages.OpenGate) -> messages.TornDown:
        """Whatever attempt has closed it, this agent's or another's; stays closed where down."""
        self._release(ask.job)
        return await asyncio.to_thread(self._open_gates, ask.job)

    def _open_gates(self, job: str) -> messages.TornDown:
        down: list[tuple[int, int]] = []
        for page, _ in self._pages(job):
            down += services.opened(page)
            page.close()
        return messages.TornDown(down, 0.0)

    # ---- while it is closed --------------------------------------------------------------------

    async def keep(self) -> None:
        """Signs of life for closed gates, until they have been closed for too long."""
        while True:
            await asyncio.sleep(BEAT_S)
            for job, closed in list(self._closed.items()):
                try:
                    await self._keep_one(job, closed)
                except Exception:
                    log.exception("the gates of %s", job)

    async def _keep_one(self, job: str, closed: Closed) -> None:
        if not any(Path(f"/proc/{pid}").exists() for pid in closed.pids.values()):
            self._release(job)  # they went on elsewhere
            return
        patience = 2 * self._house.cluster.timeouts.suspicion
        if time.monotonic() > closed.until or self._silence() > patience:
            log.warning("%s: nobody has opened its gates; opened here", job)
            await self.open(messages.OpenGate(job))
            return
        await asyncio.to_thread(closed.gate.beat)
        for page, pid in await asyncio.to_thread(lambda: list(self._pages(job))):
            if pid in closed.pids.values():
                page.close()
            else:  # a process's first collective
                closed.pids[page] = pid
                closed.gate.admit(page)

    @asynccontextmanager
    async def _all_pages(self, job: str) -> AsyncIterator[list[OrderedPage]]:
        """Whoever has closed their gates: communicators that are down came here like that."""
        pages = await asyncio.to_thread(lambda: [page for page, _ in self._pages(job)])
        try:
            yield pages
        finally:
            for page in pages:
                page.close()

    def _pages(self, job: str) -> Iterator[tuple[OrderedPage, int]]:
        """Of the living processes of the job's capsules that are here."""
        for resident in list(self._house.capsules.values()):
            if resident.spec.job == job and resident.room.alive():
                yield from ordered_pages(resident)

    def _of(self, job: str, attempt: int) -> Closed:
        closed = self._closed.get(job)
        if closed is None or closed.attempt != attempt:
            raise NotFound(f"{self._house.host} has no attempt {attempt} to quiesce {job}")
        return closed

    def _release(self, job: str) -> None:
        closed = self._closed.pop(job, None)
        if closed is not None:
            closed.gate.release()


def _aimed(seen: Report, obstacles: list[str]) -> messages.Aimed:
    return messages.Aimed(
        seen.version, seen.reached, dict(seen.numbers), obstacles, dict(seen.pairs)
    )


def _who(rank: int | None, pid: int) -> str:
    return f"rank {rank}" if rank is not None else f"process {pid}"


def _owes(debt: Debt) -> str:
    """ "rank 1 owes gloo.allreduce 7 on gloo communicator 1 (thread 1002: asleep in futex)"."""
    what = "is inside" if debt.begun else "owes"
    pair = f" {debt.sender} → {debt.receiver}" if debt.sender >= 0 else ""
    where = ", ".join(f"{p.name} {p.tid}: {p.where}" for p in debt.threads[:3])
    return (
        f"{_who(debt.rank, debt.pid)} {what} operation {debt.returned + 1} of {debt.target} on "
        f"{debt.communicator}{pair}, last {debt.operation} (threads: {where or 'not known'})"
    )
