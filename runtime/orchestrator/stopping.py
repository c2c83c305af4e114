# SPDX-License-Identifier: Apache-2.0
"""Signals that people send to jobs, and the end of a job that is not wanted any more.

A signal reaches a capsule at once while it trains, also while it is being moved. While it is
frozen its agents refuse it, and it is sent again until the capsule runs, wherever that is; the
ranks of a job that run on meanwhile get it together with the frozen one, or ``timeouts.grace``
seconds later. A capsule that is still frozen after ``timeouts.standstill`` gets it no more.

That a job is to end (SIGTERM, SIGKILL, or one capsule has failed) is written to the journal first:
then it is ended however long a host is away, and whatever becomes of the orchestrator. Its moves
are cancelled; each capsule gets SIGTERM, and is killed ``timeouts.grace`` seconds after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import LiveshiftError, NotFound, Refused, Unreachable
from .. import messages
from ..control.link import Switchboard
from ..daemon.tasks import Tasks
from ..model.jobs import Capsule, Job
from ..model.steps import Step
from .fleet import Fleet

log = logging.getLogger("liveshift.stopping")

LOOK_S = 0.05
"""Seconds between two looks whether a capsule can be reached, or has ended."""

ANSWER_S = 5.0
"""How many seconds whoever sends a signal waits for it to arrive, at most."""

FROZEN = frozenset(
    {Step.FREEZING, Step.COMMITTED, Step.RESTORING, Step.RETURNING, Step.ROLLING_BACK}
)
"""Steps of a move in which its capsule may be frozen."""


@dataclass
class _Wish:
    """That a job is to end; times are monotonic seconds."""

    by: str
    begin: float  # when SIGTERM is due
    kill: bool = False  # without SIGTERM first
    told: dict[str, float] = field(default_factory=dict)  # capsule → when it got SIGTERM
    killed: dict[str, float] = field(default_factory=dict)  # capsule → when it was last killed


class _OnTheMove(LiveshiftError):
    """It was not sent: the capsule is frozen for a move, or has just left the host."""


class Stopping:
    """Sends signals to jobs, and ends those that are not wanted any more."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard) -> None:
        self._fleet = fleet
        self._switchboard = switchboard
        self._tasks = Tasks()
        self._wishes: dict[str, _Wish] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def take_up(self) -> None:
        """Go on, after a restart, with ending what was to end."""
        for job in self._fleet.jobs.values():
            if job.state == "ending":
                self.end_rest(job)

    async def signal(self, job: Job, signum: int, by: str) -> None:
        """Send a signal to every command of a job; SIGTERM and SIGKILL end the job and its moves.

        Returns when it has arrived, or after ANSWER_S seconds: it goes on being sent. That it did
        not reach a capsule is told in the history.
        """
        if signum in (signal.SIGTERM, signal.SIGKILL):
            self._stop(job, by, kill=signum == signal.SIGKILL)
        else:
            sending = asyncio.ensure_future(self._send(job, signum))
            self._tasks.keep(sending)
            await asyncio.wait({sending}, timeout=ANSWER_S)

    def end_rest(self, job: Job) -> None:
        """End what is left of a job that is ending; where a capsule has failed the others get a
        while to notice by themselves."""
        failed = any(capsule.code for capsule in job.capsules.values())
        wait = self._fleet.cluster.timeouts.grace if failed else 0.0
        self._wish(job, "", time.monotonic() + wait)

    # ---- a job that is to end ------------------------------------------------------------------

    def _stop(self, job: Job, by: str, *, kill: bool) -> None:
        if job.state == "ended":
            return
        if job.state == "running":
            try:
                self._fleet.journal.set_job(job.name, "ending", job.code)
            except LiveshiftError as error:  # a full disk keeps no job from being ended
                log.error("%s is ended; a restart would forget that: %s", job.name, error)
            job.state = "ending"
        wish = self._wish(job, by, time.monotonic())
        wish.kill = wish.kill or kill

    def _wish(self, job: Job, by: str, begin: float) -> _Wish:
        wish = self._wishes.get(job.name)
        if wish is None:
            wish = self._wishes[job.name] = _Wish(by, begin)
            self._tasks.spawn(self._end(job, wish))
        wish.begin = min(wish.begin, begin)
        wish.by = wish.by or by
        return wish

    async def _end(self, job: Job, wish: _Wish) -> None:
        try:
            while job.state == "ending" and self._fleet.jobs.get(job.name) is job:
                if wish.kill or time.monotonic() >= wish.begin:
                    self._cancel_moves(job, wish.by or "the end of its job")
                    await self._end_those_up(job, wish)
                await asyncio.sleep(LOOK_S)
        finally:
            del self._wishes[job.name]

    def _cancel_moves(self, job: Job, by: str) -> None:
        for move in self._fleet.under_way():
            if move.job is job:
                with contextlib.suppress(Refused):  # committed: its capsule is ended over there
                    move.cancel(by)

    async def _end_those_up(self, job: Job, wish: _Wish) -> None:
        """SIGTERM for those that have had none, SIGKILL for those that have had it for a while."""
        grace, now = self._fleet.cluster.timeouts.grace, time.monotonic()
        left = [c for c in job.capsules.values() if c.code is None and self._fleet.is_up(c.host)]
        untold = [c for c in left if c.name not in wish.told]
        if untold and not wish.kill and (now > wish.begin + grace or not self._frozen(untold)):
            sent = await self._all(untold, signal.SIGTERM)
            wish.told |= {c.name: now for c, error in sent if error is None}
        late = [c for c in left if wish.kill or now > wish.told.get(c.name, now) + grace]
        again = now - self._fleet.cluster.timeouts.heartbeat
        due = [c for c in late if wish.killed.get(c.name, 0.0) < again]
        sent = await self._all(due, signal.SIGKILL)
        wish.killed |= {c.name: now for c, error in sent if error is None}

    # ---- other signals -------------------------------------------------------------------------

    async def _send(self, job: Job, signum: int) -> None:
        async with self._turns[job.name]:  # one after the other
            waiting = list(job.capsules.values())
            limits, began = self._fleet.cluster.timeouts, time.monotonic()
            while waiting := [c for c in waiting if c.code is None]:
                took = time.monotonic() - began
                last = took > max(limits.grace, limits.standstill)
                if took > limits.grace or not self._frozen(waiting):
                    sent = await self._all(waiting, signum)
                    waiting = self._not_reached(signum, sent, last=last)
                await asyncio.sleep(LOOK_S)

    def _not_reached(
        self, signum: int, sent: Iterable[tuple[Capsule, LiveshiftError | None]], *, last: bool
    ) -> list[Capsule]:
        """Those that it is to be sent to again, none after the last time. It is never sent twice to
        one."""
        again = []
        for capsule, error in sent:
            if error is None:
                continue
            if isinstance(error, _OnTheMove) and not last:
                again.append(capsule)
                continue
            name = signal.Signals(signum).name
            words = f"{name} may not have reached it on {capsule.host}: {error}"
            log.warning("%s: %s", capsule.name, words)
            self._fleet.journal.note(capsule.name, "signal", words)
        return again

    def _frozen(self, capsules: Iterable[Capsule]) -> bool:
        """Whether one of them may be frozen, or on its way, between two hosts that are up."""
        moves = (self._fleet.moves.get(c.migration) for c in capsules if c.migration)
        return any(
            move.step in FROZEN and all(map(self._fleet.is_up, (move.source, move.destination)))
            for move in moves
            if move is not None
        )

    async def _all(
        self, capsules: Iterable[Capsule], signum: int
    ) -> list[tuple[Capsule, LiveshiftError | None]]:
        """Send to all at the same time, and say what went wrong with each."""
        of = list(capsules)
        return list(zip(of, await asyncio.gather(*(self._one(c, signum) for c in of)), strict=True))

    async def _one(self, capsule: Capsule, signum: int) -> LiveshiftError | None:
        word: messages.Message = messages.Signal(capsule.name, signum)
        if signum == signal.SIGKILL:
            word = messages.End(capsule.name, capsule.epoch)
        host, migration = capsule.host, capsule.migration
        if not self._fleet.is_up(host):
            return Unreachable(f"{host} is lost")
        try:
            await self._switchboard.ask(host, word, self._fleet.cluster.timeouts.suspicion)
        except LiveshiftError as error:
            moving = migration or capsule.migration or capsule.host != host
            nothing = moving and isinstance(error, Refused | NotFound)
            return _OnTheMove(str(error)) if nothing else error
        return None
