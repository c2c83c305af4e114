# SPDX-License-Identifier: Apache-2.0
"""Brings all ranks of a job to a collective boundary, and lets them go on.

The orchestrator's side of the collective clock: it asks every host that has capsules of the job,
reckons with what they answer (collective_clock.py), and tells them how far to go. An attempt that
does not converge in time is abandoned: the gates open, the job goes on, and it is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ...errors import LiveshiftError, Refused, Unreachable
from .. import messages
from ..config.timeouts import Timeouts
from ..messages import Message
from ..migration.ground import NoBoundary
from ..model.collective_clock import Aim, CollectiveClock, Report
from ..model.jobs import Job

log = logging.getLogger("liveshift.gates")
M = TypeVar("M", bound=Message)

Ask = Callable[[str, Message, float], Awaitable[Message | None]]

ATTEMPTS = 2
BACK_OFF_S = 0.5
LOOK_S = 1.0
"""How long an agent waits for its ranks before it answers in any case."""


@dataclass(frozen=True)
class Boundary:
    """Where a job's ranks stand: ``words`` for people, ``numbers`` by clock."""

    words: str
    numbers: dict[int, int] = field(default_factory=dict)
    down: bool = False  # its NCCL communicators are torn down


NOTHING_COUNTED = Boundary("no rank has called a collective yet")


class Gates:
    """The gates of all jobs, as far as this orchestrator has closed them."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        # A page keeps the number of an earlier orchestrator's attempt. The next must be another,
        # though not a greater one: the clock may be set back, the journal restored. So, at random.
        self._attempt = secrets.randbits(31)
        self._closed: dict[str, Boundary] = {}
        self._in_place: set[str] = set()  # jobs whose boundary was not found
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._late: dict[tuple[str, str], asyncio.Task[None]] = {}  # by job and host

    async def close(self, job: Job, limits: Timeouts, shared: bool) -> Boundary:
        """Bring the job to a boundary; ``shared``: another move holds its ranks already.

        Raises NoBoundary with the job going on, or, if shared, as the other move has it.
        """
        async with self._locks[job.name]:
            if shared:
                return self._shared(job)
            for left in reversed(range(ATTEMPTS)):
                self._stop_late(job.name)
                self._attempt += 1
                attempt = Attempt(self._ask, job, self._attempt, limits)
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

    def forget(self, job: str) -> None:
        """The job has ended."""
        self._stop_late(job)
        self._closed.pop(job, None)
        self._in_place.discard(job)

    def _shared(self, job: Job) -> Boundary:
        """A rank that is frozen already can't be brought anywhere: only what is known counts."""
        if (known := self._closed.get(job.name)) is not None:
            return known
        if job.name in self._in_place:
            raise NoBoundary("another rank of the job is frozen in place", only_tcp=True)
        raise Refused(
            f"another move of {job.name} is under way and has no boundary to share",
            hint="try again when it has ended",
        )

    async def open(self, job: Job, limits: Timeouts) -> str:
        """Rebuild what is down and let the job go on; returns what there is to tell, or "".

        Hosts that do not answer are asked again until they do: unless they are cut off for long,
        they have no reason to open their gates by themselves. Raises LiveshiftError where
        communicators are down and not all could be rebuilt.
        """
        async with self._locks[job.name]:
            said = await self._open(job, limits)
            self._closed.pop(job.name, None)
            self._in_place.discard(job.name)
            return said

    async def _open(self, job: Job, limits: Timeouts) -> str:
        hosts = hosts_of(job)
        answers = await _each(hosts, lambda h: self._asked(h, messages.OpenGate(job.name), limits))
        down = {id_ for _, answer in answers if answer for id_, _ in answer.communicators}
        silent = [host for host, answer in answers if answer is None]
        known = self._closed.get(job.name)
        if silent and (down or (known and known.down)):
            raise Unreachable(f"communicators are down, and {', '.join(silent)} does not answer")
        for host in silent:
            self._open_later(job, host, limits)
        if not down:
            return ""
        began = time.monotonic()
        self._attempt += 1
        try:
            await self._rebuild(job, limits, hosts, self._attempt)
        except LiveshiftError:
            # One that stands again has members that don't: all are made again together.
            again = messages.TearDown(job.name, self._attempt)
            await _each(hosts, lambda h: self._asked(h, again, limits, limits.restore))
            raise
        answers = await _each(hosts, lambda h: self._asked(h, messages.OpenGate(job.name), limits))
        for host in [host for host, answer in answers if answer is None]:
            self._open_later(job, host, limits)
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
        """After ``collective`` its agent opens by itself."""
        until = time.monotonic() + limits.collective
        while time.monotonic() < until and host in hosts_of(job):
            await asyncio.sleep(limits.heartbeat)
            answer = await self._asked(host, messages.OpenGate(job.name), limits)
            if answer is None:
                continue
            if not answer.communicators:
                return
            # What was ordered before it fell silent has been done there after all.
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
        """Fresh ids from each communicator's first rank, then all of them in one order; but not
        those that a member has aborted, for which the others would wait."""
        fresh = messages.FreshIds(job.name, attempt)
        ids: dict[int, bytes] = {}
        sizes: dict[int, int] = {}
        members: Counter[int] = Counter()
        order: dict[int, int] = {}
        for host in hosts:  # none may be missing: it would be waited for
            answer = await _answer(
                self._ask, host, fresh, limits.answer(limits.restore), messages.Fresh
            )
            ids |= answer.ids
            sizes |= answer.sizes
            members.update(communicator for communicator, _ in answer.communicators)
            for communicator, ordinal in answer.communicators:
                order[communicator] = min(ordinal, order.get(communicator, ordinal))
        for communicator in [c for c in ids if members[c] < sizes.get(c, 0)]:
            log.warning(
                "job %s: communicator %x stays down: %d of its %d members have it still",
                job.name, communicator, members[communicator], sizes[communicator],
            )  # fmt: skip
            del ids[communicator]
        ranked = sorted(ids, key=lambda c: (order.get(c, 0), c))
        orders = {c: (n, ids[c]) for n, c in enumerate(ranked, start=1)}
        rebuild = messages.Rebuild(job.name, attempt, orders)
        limit = limits.answer(limits.restore)
        await asyncio.gather(
            *(_answer(self._ask, host, rebuild, limit, messages.TornDown) for host in hosts)
        )

    async def _asked(
        self, host: str, message: Message, limits: Timeouts, deadline: float = 0.0
    ) -> messages.TornDown | None:
        try:
            limit = limits.answer(deadline)
            return await _answer(self._ask, host, message, limit, messages.TornDown)
        except LiveshiftError as error:
            log.warning("%s at %s: %s", type(message).__name__, host, error)
            return None


class Attempt:
    """One attempt to find a boundary."""

    def __init__(self, ask: Ask, job: Job, number: int, limits: Timeouts) -> None:
        self._ask = ask
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
        """Raises NoBoundary, or what an agent said; the gates are closed then."""
        armed = await self._arm()
        self._stop_at([o for _, answer in armed for o in answer.obstacles])
        if not self._ranks:
            return NOTHING_COUNTED
        clock = CollectiveClock(self._hosts)
        for host, answer in armed:
            clock.hear(host, Report(0, answer.numbers, False, answer.pairs))
        try:
            async with asyncio.timeout(self._limits.quiesce):
                while True:
                    await self._steer(clock)
                    if await self._shut(clock):
                        break
        except TimeoutError:
            raise await self._who_owes() from None
        down = not self._only_tcp and await self._tear_down()
        return Boundary(self._words(clock), dict(clock.targets), down)

    async def _arm(self) -> list[tuple[str, messages.Armed]]:
        limits = self._limits
        arm = messages.Arm(self._job.name, self._number, limits.collective, limits.restore)
        armed = await self._all(arm, limits.suspicion, messages.Armed)
        for _, answer in armed:
            self._members += answer.members
            self._ranks += answer.ranks
        return armed

    async def _steer(self, clock: CollectiveClock) -> None:
        """Tell every host how far to go until all of them are there."""
        asked: dict[asyncio.Task[messages.Aimed], str] = {}
        try:
            while not clock.converged:
                for host in {*clock.due(), *(set(clock.debtors) - set(asked.values()))}:
                    asked[self._aim(host, clock.aim(host))] = host
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    host, answer = asked.pop(task), task.result()
                    self._stop_at(answer.obstacles)
                    clock.hear(host, _report(answer))
        finally:
            for task in asked:
                task.cancel()

    def _aim(self, host: str, aim: Aim) -> asyncio.Task[messages.Aimed]:
        message = messages.Aim(
            self._job.name, self._number, aim.version, aim.targets, LOOK_S, aim.pairs
        )
        limit = LOOK_S + self._limits.suspicion
        return asyncio.ensure_future(_answer(self._ask, host, message, limit, messages.Aimed))

    async def _shut(self, clock: CollectiveClock) -> bool:
        """Whether all are where they were believed to be, with their streams drained."""
        shut = messages.Shut(self._job.name, self._number)
        still = True
        for host, answer in await self._all(
            shut, self._limits.answer(self._limits.restore), messages.Aimed
        ):
            self._stop_at(answer.obstacles)
            still = still and answer.reached
            clock.hear(host, _report(answer))
        return still and clock.converged

    async def _tear_down(self) -> bool:
        down = messages.TearDown(self._job.name, self._number)
        limit = self._limits.answer(self._limits.restore)
        answers = await self._all(down, limit, messages.TornDown)
        return any(answer.communicators for _, answer in answers)

    async def _who_owes(self) -> NoBoundary:
        """Why it did not converge, from the ranks' own pages."""
        ask = messages.WhoOwes(self._job.name, self._number)
        said = await _each(
            self._hosts,
            lambda h: _answer(self._ask, h, ask, self._limits.suspicion, messages.Owing),
        )
        lines = [line for _, answer in said if answer for line in answer.lines]
        shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        return NoBoundary(
            f"no collective boundary within {self._limits.quiesce:g} s: "
            + (shown or "no rank says what it waits for"),
            only_tcp=self._only_tcp,
        )

    def _stop_at(self, obstacles: Iterable[str]) -> None:
        words = list(dict.fromkeys(obstacles))
        if words:
            raise NoBoundary(
                "no collective boundary: " + "; ".join(words[:4]),
                only_tcp=self._only_tcp,
                hint="it would not be found by trying again",
            )

    def _words(self, clock: CollectiveClock) -> str:
        """The communicator with most members, and how far it has come."""
        by_id: dict[int, list[messages.Member]] = defaultdict(list)
        for member in self._members:
            by_id[member.communicator].append(member)
        used = {c: n for c in by_id if (n := clock.targets.get(c, 0))}
        if not used:
            return f"paused before the first collective of {len(by_id)} communicators"
        widest = max(used, key=lambda c: (by_id[c][0].size, used[c]))
        others = len(used) - 1
        more = f" (and {others} more communicator{'s' if others > 1 else ''})" if others else ""
        return (
            f"paused after collective {used[widest]} of {communicator_words(by_id[widest])}{more}"
        )

    async def _all(self, message: Message, limit: float, expect: type[M]) -> list[tuple[str, M]]:
        answers = await asyncio.gather(
            *(_answer(self._ask, host, message, limit, expect) for host in self._hosts)
        )
        return list(zip(self._hosts, answers, strict=True))


def _report(answer: messages.Aimed) -> Report:
    return Report(answer.version, answer.raised, answer.reached, answer.pairs)


def hosts_of(job: Job) -> list[str]:
    """The hosts that have capsules of the job which have not ended."""
    return sorted({c.host for c in job.capsules.values() if c.code is None})


def communicator_words(members: list[messages.Member]) -> str:
    """ "gloo ranks 0-3", "nccl tp of ranks 0, 2"."""
    first = members[0]
    ranks = sorted(m.world_rank if m.world_rank >= 0 else m.rank for m in members)
    spans: list[str] = []
    begin = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            spans.append(str(ranks[begin]) if i - begin == 1 else f"{ranks[begin]}-{ranks[i - 1]}")
            begin = i
    name = f"{first.library} {first.name}".strip()
    return f"{name} over rank{'s' if len(ranks) > 1 else ''} {','.join(spans)}"


async def _answer(ask: Ask, host: str, message: Message, limit: float, expect: type[M]) -> M:
    answer = await ask(host, message, limit)
    if not isinstance(answer, expect):
        raise LiveshiftError(f"{host} answered {type(message).__name__} with {answer!r}")
    return answer


async def _each(
    hosts: list[str], ask: Callable[[str], Awaitable[M | None]]
) -> list[tuple[str, M | None]]:
    """Ask all at once; None for those that failed."""

    async def one(host: str) -> M | None:
        with contextlib.suppress(LiveshiftError):
            return await ask(host)
        return None

    return list(zip(hosts, await asyncio.gather(*map(one, hosts)), strict=True))
