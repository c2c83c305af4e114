# SPDX-License-Identifier: Apache-2.0
"""A host's part in quiescing jobs: it closes and opens the gates of its capsules' processes.

The state is in the interposer pages. They say whether a gate is closed and whether communicators
are down. So a restarted agent, or a host to which a closed capsule has moved, can open a gate. The
latter also keeps it closed until then, since another move of the job may still hold the boundary.
The agent opens a gate unasked when it was closed for longer than agreed, or when the orchestrator
has been silent: a job whose communicators are up loses nothing by that. If communicators are down,
no rank can go on alone, and the gate stays closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from ...errors import NotFound, Refused
from ...interposer.layout import WantedState
from ...interposer.orders import OrderedPage
from ...interposer.page import PageError
from .. import messages
from ..model.collective_clock import ClockReport
from ..quiesce import services
from ..quiesce.host_gate import HostGate, page_problem
from .closed_gates import ClosedGates
from .gpu.cuda_processes import has_cuda
from .host.capsule_table import CapsuleTable
from .host.rank_pages import lives, log_page_error, members, ordered_pages, unknown
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.gates")

POLL_S = 0.001
HEARTBEAT_S = 0.5
"""The agent gives closed gates a sign of life every HEARTBEAT_S seconds."""
NO_ATTEMPT = 0
"""The number of no attempt: see attempt in interposer/gate/page.h."""
MOST_PAGES = 512
"""A job may have at most this many processes with a page on a host, else no boundary is possible.
Each page takes a descriptor of the agent, and the job's user can start as many processes as
that user's limit allows."""


class GateHandlers:
    """The gates of one host; ``silence``: seconds since the orchestrator was last heard.

    Requests that close, open or tear down take turns in the order in which they come: after a link
    was stuck for a while, an Arm and the OpenGate that gave it up can come together.
    """

    def __init__(
        self,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        silence: Callable[[], float],
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._silence = silence
        self._closed: dict[str, ClosedGates] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # ---- requests of the orchestrator ----------------------------------------------------------

    async def arm(self, request: messages.Arm) -> messages.Armed:
        async with self._turns[request.job]:
            await self._release(request.job)
            self._registry.gates_close(request.job)
            closed = await asyncio.to_thread(self._close_gates, request)
            self._closed[request.job] = closed
        until = time.monotonic() + self._capsule_table.cluster.timeouts.suspicion / 2
        begun = await closed.use(closed.gate.announced)
        while begun is None and time.monotonic() < until:  # a rank is beginning a group
            await asyncio.sleep(POLL_S)
            begun = await closed.use(closed.gate.announced)
        obstacles, who = await closed.use(lambda: (closed.fatal(), _members(closed)))
        if begun is None:
            obstacles.append(
                f"{self._capsule_table.host}: a group of operations was begun and not ended"
            )
        if bool(closed.unreadable) and await asyncio.to_thread(self._has_cuda, request.job):
            who.append(unknown())
        numbers, pairs = (dict(begun.numbers), dict(begun.pairs)) if begun else ({}, {})
        return messages.Armed(numbers, who, len(closed.pids), obstacles, pairs)

    def _has_cuda(self, job: str) -> bool:
        return any(
            has_cuda(c) for c in list(self._capsule_table.capsules.values()) if c.spec.job == job
        )

    def _close_gates(self, request: messages.Arm) -> ClosedGates:
        pids: dict[OrderedPage, int] = {}
        gate = self._host_gate(pids, request.attempt, request.limit)
        closed = ClosedGates(request.attempt, gate, pids, time.monotonic() + request.hold, {})
        try:
            found = list(self._new_pages(request.job, closed))
            if any(_down(page) for page in found):
                raise Refused(
                    f"communicators of {request.job} are down on {self._capsule_table.host}"
                )
            for page in found:
                gate.admit(page)
        except BaseException:
            for page in pids:
                page.close()
            raise
        return closed

    def _host_gate(self, pids: dict[OrderedPage, int], attempt: int, limit: float) -> HostGate:
        lease = 2 * self._capsule_table.cluster.timeouts.suspicion
        return HostGate(
            attempt,
            int(1000 * lease),
            int(1000 * limit),
            lambda page: lives(pids[page]) and not page.replaced,
        )

    async def aim(self, request: messages.SetTargets) -> messages.TargetsSet:
        closed = self._of(request.job, request.attempt)
        if request.version > closed.version:
            closed.version = request.version
            await closed.use(
                lambda: closed.gate.aim(request.version, request.targets, request.pairs)
            )
        until = time.monotonic() + request.wait
        while True:
            began = time.monotonic()
            seen = await closed.use(closed.gate.report)
            superseded = (
                closed.version > request.version or self._closed.get(request.job) is not closed
            )
            if seen.reached or seen.numbers or superseded or time.monotonic() > until:
                obstacles = [] if seen.reached else await closed.use(closed.fatal)
                return _aimed(seen, obstacles)
            await asyncio.sleep(max(POLL_S, time.monotonic() - began))

    async def shut(self, request: messages.Shut) -> messages.TargetsSet:
        async with self._turns[request.job]:
            closed = self._of(request.job, request.attempt)
            await closed.use(lambda: self._admit_new(request.job, closed))
            seen, obstacles, pages = await closed.use(lambda: _shut(closed))
        if seen.reached and not obstacles:
            obstacles = await services.drained(pages, request.attempt)
        return _aimed(seen, obstacles)

    async def list_behind(self, request: messages.ListBehind) -> messages.Behind:
        closed = self._of(request.job, request.attempt)
        pending = await closed.use(lambda: closed.gate.pending_returns(closed.pids.get))
        found = await closed.use(closed.gate.obstacles)
        notes = [str(obstacle) for obstacle in found]
        if not pending and closed.gate.want is WantedState.CLOSED:
            draining = await closed.use(
                lambda: services.draining(closed.gate.pages, request.attempt)
            )
            notes += [f"{services.who(p.rank, p.pid)} drains its streams" for p in draining]
        return messages.Behind(pending + notes)

    async def tear_down(self, request: messages.TearDown) -> messages.TornDown:
        async with self._turns[request.job], self._all_pages(request.job) as pages:
            return await services.torn_down(pages, request.attempt)

    async def fresh_ids(self, request: messages.FreshIds) -> messages.Fresh:
        async with self._all_pages(request.job) as pages:
            return await services.fresh_ids(pages, request.attempt)

    async def rebuild(self, request: messages.Rebuild) -> messages.TornDown:
        async with self._all_pages(request.job) as pages:
            return await services.rebuilt(pages, request.attempt, request.ids)

    async def open(self, request: messages.OpenGate) -> messages.TornDown:
        """Open the gates, no matter which attempt or agent closed them. A gate stays closed if its
        communicators are down."""
        async with self._turns[request.job]:
            await self._release(request.job)
            opened = await asyncio.to_thread(self._open_gates, request.job)
            self._registry.gates_open(request.job)
            return opened

    def _open_gates(self, job: str) -> messages.TornDown:
        down: list[tuple[int, int]] = []
        for page, _ in self._pages(job):
            down += services.opened(page)
            page.close()
        return messages.TornDown(down, 0.0)

    async def arrive(self, job: str, hold: float) -> None:
        """Give signs of life to the gates that have come here closed with a capsule of the job, as
        the host did from which it came. ``hold``: as in Arm, from now on."""
        try:
            async with self._turns[job]:
                if (closed := self._closed.get(job)) is None:
                    closed = await asyncio.to_thread(self._closed_gates, job, hold)
                    if closed.pids:
                        self._closed[job] = closed
                elif closed.arrived:
                    await closed.use(lambda: self._adopt_new(job, closed))
                else:
                    await closed.use(lambda: self._admit_new(job, closed))
        except Exception:  # they open by themselves after their lease
            log.exception("the gates of %s have no sign of life", job)

    def _closed_gates(self, job: str, hold: float) -> ClosedGates:
        pids: dict[OrderedPage, int] = {}
        gate, until = self._host_gate(pids, NO_ATTEMPT, 0.0), time.monotonic() + hold
        closed = ClosedGates(NO_ATTEMPT, gate, pids, until, {}, arrived=True)
        try:
            self._adopt_new(job, closed)
        except BaseException:
            gate.release()
            raise
        return closed

    def _adopt_new(self, job: str, closed: ClosedGates) -> None:
        for page in self._new_pages(job, closed):
            if _waits(page):
                closed.gate.adopt(page)
            else:
                del closed.pids[page]
                page.close()

    # ---- while it is closed --------------------------------------------------------------------

    async def keep(self) -> None:
        """Give signs of life to closed gates; open those that were closed for too long."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                # No job waits for its sign behind another, which may have many pages, or whose
                # teardown must end before its gates can open.
                for job, closed in list(self._closed.items()):
                    if not closed.kept:
                        closed.kept = True
                        tasks.create_task(self._keep(job, closed))

    async def _keep(self, job: str, closed: ClosedGates) -> None:
        try:
            await self._keep_one(job, closed)
        except NotFound:
            pass  # the gates were opened meanwhile
        except Exception:
            log.exception("the gates of %s", job)
        finally:
            closed.kept = False

    async def _keep_one(self, job: str, closed: ClosedGates) -> None:
        patience = 2 * self._capsule_table.cluster.timeouts.suspicion
        if time.monotonic() > closed.until or self._silence() > patience:
            log.warning("%s: no order to open its gates came in time; opened here", job)
            await self.open(messages.OpenGate(job))
            return
        await closed.use(closed.gate.heartbeat)
        if not closed.arrived:
            await closed.use(lambda: self._admit_new(job, closed))
        if closed.pids and not await closed.use(lambda: closed.gate.pages):
            async with self._turns[job]:  # its processes went on elsewhere, and none came meanwhile
                if not await closed.use(lambda: closed.gate.pages):
                    await self._release(job)

    def _admit_new(self, job: str, closed: ClosedGates) -> None:
        """Admit processes that have made their page since the gates closed: it is born open."""
        for page in self._new_pages(job, closed):
            closed.gate.admit(page)

    def _new_pages(self, job: str, closed: ClosedGates) -> Iterator[OrderedPage]:
        """Pages that ``closed`` does not have yet; notes them in its ``pids``. A page that cannot
        be read belongs to a rank that no boundary can hold."""
        closed.unreadable.clear()
        pages = closed.gate.pages
        known, many = {page.inode for page in pages}, len(pages)

        def note(path: Path, error: PageError) -> None:
            log_page_error(path, error)
            closed.unreadable[path] = page_problem(path, error)

        for page, pid in self._pages(job, known, note):
            if many == MOST_PAGES:
                page.close()
                note(page.path, PageError(f"{job} has more than {MOST_PAGES} processes with pages"))
                return
            many += 1
            closed.pids[page] = pid
            yield page

    @asynccontextmanager
    async def _all_pages(self, job: str) -> AsyncIterator[list[OrderedPage]]:
        """All pages of the job, no matter which agent closed their gates: a capsule may have come
        here with its communicators down."""
        pages: list[OrderedPage] = []
        await asyncio.to_thread(lambda: pages.extend(page for page, _ in self._pages(job)))
        try:
            yield pages
        finally:
            for page in pages:
                page.close()

    def _pages(
        self,
        job: str,
        known: Container[tuple[int, int]] = (),
        on_error: Callable[[Path, PageError], None] = log_page_error,
    ) -> Iterator[tuple[OrderedPage, int]]:
        """Pages of the living processes of the job's capsules on this host: see ordered_pages."""
        for resident in list(self._capsule_table.capsules.values()):
            if resident.spec.job == job and resident.sandbox.alive():
                yield from ordered_pages(resident, known, on_error)

    def _of(self, job: str, attempt: int) -> ClosedGates:
        closed = self._closed.get(job)
        if closed is None or closed.attempt != attempt:
            raise NotFound(f"{self._capsule_table.host} has no attempt {attempt} to quiesce {job}")
        return closed

    async def _release(self, job: str) -> None:
        closed = self._closed.pop(job, None)
        if closed is not None:
            await closed.release()


def _members(closed: ClosedGates) -> list[messages.Member]:
    return [member for page in closed.gate.pages for member in members(page)]


def _shut(closed: ClosedGates) -> tuple[ClockReport, list[str], list[OrderedPage]]:
    closed.gate.close()
    return closed.gate.report(), closed.fatal(), closed.gate.pages


def _down(page: OrderedPage) -> bool:
    try:
        return bool(page.answer()["down"])
    except PageError:
        return False  # the attempt reports the damaged page


def _waits(page: OrderedPage) -> bool:
    """Whether its threads would open the gate by themselves if they saw no sign of life."""
    try:
        order, answer = page.order(), page.answer()
    except PageError as error:
        log.warning("%s", error)
        return False
    opened = order["want"] == WantedState.OPEN or answer["reopened"] == order["attempt"]
    return not (opened or answer["down"])


def _aimed(seen: ClockReport, obstacles: list[str]) -> messages.TargetsSet:
    return messages.TargetsSet(
        seen.version, seen.reached, dict(seen.numbers), obstacles, dict(seen.pairs)
    )
