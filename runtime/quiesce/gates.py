# SPDX-License-Identifier: Apache-2.0
"""Brings all ranks of a job to a boundary, and lets them go on.

This is the orchestrator's side of the quiesce. It asks every host that has capsules of the job,
computes the targets from the answers (collective_clock.py), and sends them to the hosts. It gives
up an attempt that does not converge in time: the gates open, the job goes on, and it tries again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ... import units
from ...errors import LiveshiftError, Refused, Unreachable
from .. import messages
from ..config.timeouts import Timeouts
from ..messages import Message
from ..messages.answers import expected
from ..migration.context import NoBoundary
from ..model.collective_clock import ClockReport, CollectiveClock, Targets
from ..model.jobs import Job

log = logging.getLogger("liveshift.gates")
M = TypeVar("M", bound=Message)

Request = Callable[[str, Message, float], Awaitable[Message | None]]

ATTEMPTS = 2
BACK_OFF_S = 0.5
LOOK_S = 1.0
"""An agent answers after at most this many seconds, even if its ranks are not at their targets."""


@dataclass(frozen=True)
class Boundary:
    """The boundary at which a job's ranks are: ``text`` for people, ``numbers`` by clock id."""

    text: str
    numbers: dict[int, int] = field(default_factory=dict)
    down: bool = False  # its NCCL communicators are torn down


NOTHING_COUNTED = Boundary("no rank has called a collective yet")


class Gates:
    """The gates that this orchestrator has closed, of all jobs."""

    def __init__(self, request: Request) -> None:
        self._request = request
        # A page keeps the attempt number of an earlier orchestrator. A new attempt needs another
        # number, not a greater one. Clock and journal may be set back, so the start is random.
        self._attempt = secrets.randbits(31)
        self._closed: dict[str, Boundary] = {}
        self._in_place: set[str] = set()  # TCP-only jobs for which no boundary was found
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._late: dict[tuple[str, str], asyncio.Task[None]] = {}  # by (job, host): opens later
        self._opened: dict[str, float] = {}  # by job

    async def close(self, job: Job, limits: Timeouts, shared: bool) -> Boundary:
        """Bring the job to a boundary; ``shared``: another move holds its ranks already.

        Raises NoBoundary; then the job goes on, or, if shared, stays as the other move holds it.
        """
        async with self._locks[job.name]:
            if shared:
                return self._shared(job)
            for left in reversed(range(ATTEMPTS)):
                self._stop_late(job.name)
                self._attempt += 1
                attempt = Attempt(self._request, job, self._attempt, limits)
                try:
                    boundary = await attempt.run()
                    self._closed[job.name] = boundary
                    return boundary
                except LiveshiftError as error:
                    await self._open(job, limits)
                    if isinstance(error, NoBoundary) and error.only_tcp:
                        self._in_place.add(job.name)
                    if not left or (isinstance(error, NoBoundary) and error.hint is not None):
                        raise
                    log.warning("%s: attempt %d: %s", job.name, self._attempt, error)
                    await asyncio.sleep(BACK_OFF_S)
            raise AssertionError

    def opened(self, job: Job) -> float:
        """When all hosts of a job last said that its gates are open, in monotonic seconds; 0 for
        never."""
        return self._opened.get(job.name, 0.0)

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        self._opened.pop(job, None)
        self._stop_late(job)
        self._closed.pop(job, None)
        self._in_place.discard(job)

    def _shared(self, job: Job) -> Boundary:
        """Return the boundary that another move has found: a rank that may already be frozen cannot
        be brought to a new one. Raises NoBoundary or Refused if there is none."""
        if (known := self._closed.get(job.name)) is not None:
            return known
        if job.name in self._in_place:
            raise NoBoundary("another rank of the job is frozen in place", only_tcp=True)
        raise Refused(
            f"another move of {job.name} is under way and has no boundary to share",
            hint="try again when it has ended",
        )

    async def open(self, job: Job, limits: Timeouts) -> str:
        """Rebuild communicators that are down and let the job go on; returns a remark, or "".

        A host that does not answer is asked again until it does: its agent opens the gates by
        itself only if it is cut off for long. Raises LiveshiftError if communicators are down and
        not all could be rebuilt.
        """
        async with self._locks[job.name]:
            remark = await self._open(job, limits)
            self._closed.pop(job.name, None)
            self._in_place.discard(job.name)
            return remark

    async def _open(self, job: Job, limits: Timeouts) -> str:
        hosts = hosts_of(job)
        opening, suspicion = messages.OpenGate(job.name), limits.suspicion
        answers = await self._answers(hosts, opening, suspicion)
        down = {id_ for answer in answers.values() if answer for id_, _ in answer.communicators}
        silent = [host for host, answer in answers.items() if answer is None]
        known = self._closed.get(job.name)
        if silent and (down or (known and known.down)):
            raise Unreachable(f"communicators are down, and {', '.join(silent)} does not answer")
        for host in silent:
            self._open_later(job, host, limits)
        if not down:
            if not silent:
                self._opened[job.name] = time.monotonic()
            return ""
        began = time.monotonic()
        self._attempt += 1
        try:
            await self._rebuild(job, limits, hosts, self._attempt)
        except LiveshiftError:
            # Some members may be rebuilt and others not: tear all down, to rebuild them together.
            again = messages.TearDown(job.name, self._attempt)
            await self._answers(hosts, again, limits.answer(limits.restore))
            raise
        answers = await self._answers(hosts, opening, suspicion)
        silent = [host for host, answer in answers.items() if answer is None]
        for host in silent:
            self._open_later(job, host, limits)
        if not silent:
            self._opened[job.name] = time.monotonic()
        return f"{len(down)} communicators rebuilt in {time.monotonic() - began:.2f} s"

    def _open_later(self, job: Job, host: str, limits: Timeouts) -> None:
        key = job.name, host
        before = self._late.pop(key, None)
        if before is not None and before is not asyncio.current_task():
            before.cancel()
        task = self._late[key] = asyncio.create_task(self._until_open(job, host, limits))
        task.add_done_callback(
            lambda done: self._late.pop(key, None) if self._late.get(key) is done else None
        )

    async def _until_open(self, job: Job, host: str, limits: Timeouts) -> None:
        """Ask a host until its gates are open, at most ``timeouts.collective`` seconds: after that
        its agent opens them by itself."""
        until = time.monotonic() + limits.collective
        while time.monotonic() < until and host in hosts_of(job):
            await asyncio.sleep(limits.heartbeat)
            opening = messages.OpenGate(job.name)
            answer = await self._answer_or_none(host, opening, limits.suspicion)
            if answer is None:
                continue
            if not answer.communicators:
                return
            # Before the host stopped answering, it took communicators down as ordered: rebuild.
            try:
                async with self._locks[job.name]:
                    await self._open(job, limits)
                return
            except LiveshiftError as error:
                log.warning("%s: %s", job.name, error)

    def _stop_late(self, job: str) -> None:
        for key in [key for key in self._late if key[0] == job]:
            self._late.pop(key).cancel()

    async def _rebuild(self, job: Job, limits: Timeouts, hosts: list[str], attempt: int) -> None:
        """Get a fresh id from rank 0 of each communicator, then rebuild all in one order. Leave out
        a communicator that a member has aborted: the other members would wait for that member."""
        fresh = messages.FreshIds(job.name, attempt)
        ids: dict[int, bytes] = {}
        sizes: dict[int, int] = {}
        members: Counter[int] = Counter()
        order: dict[int, int] = {}
        for host in hosts:  # all must answer: the other ranks would wait for a missing one
            answer = await _answer(
                self._request, host, fresh, limits.answer(limits.restore), messages.Fresh
            )
            ids |= answer.ids
            sizes |= answer.sizes
            members.update(communicator for communicator, _ in answer.communicators)
            for communicator, ordinal in answer.communicators:
                order[communicator] = min(ordinal, order.get(communicator, ordinal))
        for communicator in [c for c in ids if members[c] < sizes.get(c, 0)]:
            log.warning(
                "job %s: communicator %x stays down: %d of its %d members have it still",
                job.name,
                communicator,
                members[communicator],
                sizes[communicator],
            )
            del ids[communicator]
        ranked = sorted(ids, key=lambda c: (order.get(c, 0), c))
        orders = {c: (n, ids[c]) for n, c in enumerate(ranked, start=1)}
        rebuild = messages.Rebuild(job.name, attempt, orders)
        limit = limits.answer(limits.restore)
        await asyncio.gather(
            *(_answer(self._request, host, rebuild, limit, messages.TornDown) for host in hosts)
        )

    async def _answers(
        self, hosts: list[str], message: Message, limit: float
    ) -> dict[str, messages.TornDown | None]:
        """Ask all hosts at once; the answer is None for a host that failed."""
        asked = (self._answer_or_none(host, message, limit) for host in hosts)
        return dict(zip(hosts, await asyncio.gather(*asked), strict=True))

    async def _answer_or_none(
        self, host: str, message: Message, limit: float
    ) -> messages.TornDown | None:
        try:
            return await _answer(self._request, host, message, limit, messages.TornDown)
        except LiveshiftError as error:
            log.warning("%s at %s: %s", type(message).__name__, host, error)
            return None


class Attempt:
    """One attempt to find a boundary."""

    def __init__(self, request: Request, job: Job, number: int, limits: Timeouts) -> None:
        self._request = request
        self._job = job
        self._number = number
        self._limits = limits
        self._hosts = hosts_of(job)
        self._members: list[messages.Member] = []
        self._ranks = 0

    @property
    def _only_tcp(self) -> bool:
        return all(member.library != "nccl" for member in self._members)

    async def run(self) -> Boundary:
        """Find a boundary. Raises NoBoundary or an agent's error; then gates may still be closed,
        and the caller must open them."""
        armed = await self._arm()
        self._stop_at([o for _, answer in armed for o in answer.obstacles])
        if not self._ranks:
            return NOTHING_COUNTED
        clock = CollectiveClock(self._hosts)
        for host, answer in armed:
            clock.add_report(host, ClockReport(0, answer.numbers, False, answer.pairs))
        try:
            async with asyncio.timeout(self._limits.quiesce):
                while True:
                    await self._steer(clock)
                    if await self._shut(clock):
                        break
        except TimeoutError:
            raise await self._ranks_behind() from None
        down = not self._only_tcp and await self._tear_down()
        return Boundary(self._text(clock), dict(clock.targets), down)

    async def _arm(self) -> list[tuple[str, messages.Armed]]:
        limits = self._limits
        arm = messages.Arm(self._job.name, self._number, limits.collective, limits.restore)
        armed = await self._all(arm, limits.suspicion, messages.Armed)
        for _, answer in armed:
            self._members += answer.members
            self._ranks += answer.ranks
        return armed

    async def _steer(self, clock: CollectiveClock) -> None:
        """Send every host its targets, until all hosts have reached the newest ones."""
        pending: dict[asyncio.Task[messages.TargetsSet], str] = {}
        try:
            while not clock.converged:
                for host in {*clock.due(), *(set(clock.behind) - set(pending.values()))}:
                    pending[self._aim(host, clock.aim(host))] = host
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    host, answer = pending.pop(task), task.result()
                    self._stop_at(answer.obstacles)
                    clock.add_report(host, _report(answer))
        finally:
            for task in pending:
                task.cancel()

    def _aim(self, host: str, aim: Targets) -> asyncio.Task[messages.TargetsSet]:
        message = messages.SetTargets(
            self._job.name, self._number, aim.version, aim.targets, LOOK_S, aim.pairs
        )
        limit = LOOK_S + self._limits.suspicion
        return asyncio.ensure_future(
            _answer(self._request, host, message, limit, messages.TargetsSet)
        )

    async def _shut(self, clock: CollectiveClock) -> bool:
        """Close the gates and drain the streams; return True if all ranks are at their targets."""
        shut = messages.Shut(self._job.name, self._number)
        still = True
        for host, answer in await self._all(
            shut, self._limits.answer(self._limits.restore), messages.TargetsSet
        ):
            self._stop_at(answer.obstacles)
            still = still and answer.reached
            clock.add_report(host, _report(answer))
        return still and clock.converged

    async def _tear_down(self) -> bool:
        down = messages.TearDown(self._job.name, self._number)
        limit = self._limits.answer(self._limits.restore)
        answers = await self._all(down, limit, messages.TornDown)
        return any(answer.communicators for _, answer in answers)

    async def _ranks_behind(self) -> NoBoundary:
        """Return a NoBoundary that says which ranks are behind, from their interposer pages."""
        request = messages.ListBehind(self._job.name, self._number)
        limit = self._limits.suspicion
        answers = await asyncio.gather(
            *(_answer(self._request, h, request, limit, messages.Behind) for h in self._hosts),
            return_exceptions=True,
        )
        lines = [
            line for each in answers if isinstance(each, messages.Behind) for line in each.lines
        ]
        shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        return NoBoundary(
            f"no collective boundary within {self._limits.quiesce:g} s: "
            + (shown or "no rank reports what it waits for"),
            only_tcp=self._only_tcp,
        )

    def _stop_at(self, obstacles: Iterable[str]) -> None:
        texts = list(dict.fromkeys(obstacles))
        if texts:
            raise NoBoundary(
                "no collective boundary: " + "; ".join(texts[:4]),
                only_tcp=self._only_tcp,
                hint="another attempt would not find one either",
            )

    def _text(self, clock: CollectiveClock) -> str:
        """Name the used communicator with most members, and the number of its last collective."""
        by_id: dict[int, list[messages.Member]] = defaultdict(list)
        for member in self._members:
            by_id[member.communicator].append(member)
        used = {c: n for c in by_id if (n := clock.targets.get(c, 0))}
        if not used:
            return f"paused before the first collective of {len(by_id)} communicators"
        widest = max(used, key=lambda c: (by_id[c][0].size, used[c]))
        others = len(used) - 1
        more = f" (and {others} more communicator{'s' if others > 1 else ''})" if others else ""
        return f"paused after collective {used[widest]} of {communicator_text(by_id[widest])}{more}"

    async def _all(self, message: Message, limit: float, expect: type[M]) -> list[tuple[str, M]]:
        answers = await asyncio.gather(
            *(_answer(self._request, host, message, limit, expect) for host in self._hosts)
        )
        return list(zip(self._hosts, answers, strict=True))


def _report(answer: messages.TargetsSet) -> ClockReport:
    return ClockReport(answer.version, answer.raised, answer.reached, answer.pairs)


def hosts_of(job: Job) -> list[str]:
    """List the hosts of the job's capsules that have not ended."""
    return sorted({c.host for c in job.capsules.values() if c.code is None})


def communicator_text(members: list[messages.Member]) -> str:
    """Name a communicator in words: "gloo over ranks 0-3", "nccl tp over ranks 0,2"."""
    first = members[0]
    ranks = [m.world_rank if m.world_rank >= 0 else m.rank for m in members]
    name = f"{first.library} {first.name}".strip()
    return f"{name} over rank{'s' if len(ranks) > 1 else ''} {units.ranges(ranks)}"


async def _answer(
    request: Request, host: str, message: Message, limit: float, expect: type[M]
) -> M:
    return expected(expect, host, message, await request(host, message, limit))
