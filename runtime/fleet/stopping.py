# SPDX-License-Identifier: Apache-2.0
"""Sends people's signals to jobs, and ends jobs that must end.

A signal reaches a capsule at once while the capsule trains, also during a pre-copy. While the
capsule is frozen, its agents refuse the signal, and the orchestrator sends it again until the
capsule runs, on either host. The job's other ranks get the signal together with the frozen one, or
after ``timeouts.grace`` seconds. The orchestrator gives up on a capsule that is still frozen after
the longer of ``timeouts.grace`` and ``timeouts.standstill``.

If a job must end (SIGTERM, SIGKILL, or one capsule has failed), the orchestrator first writes that
to the journal. So the job ends even if a host is away for long or the orchestrator restarts. The
orchestrator cancels the job's moves, sends SIGTERM to each capsule, and kills it
``timeouts.grace`` seconds after that.
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
from ..losses.deaths import ASKS_TO_END
from ..model.jobs import Capsule, Job
from ..model.steps import MigrationStep
from .fleet import Fleet

log = logging.getLogger("liveshift.stopping")

LOOK_S = 0.05
"""Every LOOK_S seconds the orchestrator checks whether a capsule can be reached or has ended."""

ANSWER_S = 5.0
"""A person who sends a signal waits at most this many seconds for it to arrive."""

FROZEN = frozenset(
    {
        MigrationStep.FREEZING,
        MigrationStep.COMMITTED,
        MigrationStep.RESTORING,
        MigrationStep.RETURNING,
        MigrationStep.ROLLING_BACK,
    }
)
"""Steps of a move in which its capsule may be frozen."""


@dataclass
class _Wish:
    """The request that a job must end; times are monotonic seconds."""

    by: str
    begin: float  # when SIGTERM is due
    kill: bool = False  # send SIGKILL without SIGTERM first
    terminated: dict[str, float] = field(default_factory=dict)  # capsule → when it got SIGTERM
    killed: dict[str, float] = field(default_factory=dict)  # capsule → when it was last killed


class _OnTheMove(LiveshiftError):
    """The signal was not sent: the capsule is frozen for a move or for a snapshot, or it has just
    left the host."""


class Stopping:
    """The orchestrator has one instance, which sends signals to jobs and ends jobs. If a job must
    end, ``signal`` and ``end_rest`` return before it has ended. A task of the instance then goes on
    until the job has ended, also while one of its hosts is away."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard) -> None:
        self._fleet = fleet
        self._switchboard = switchboard
        self._tasks = Tasks()
        self._wishes: dict[str, _Wish] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def resume(self) -> None:
        """After a restart, continue to end the jobs that the journal marks as ending."""
        for job in self._fleet.jobs.values():
            if job.state == "ending":
                self.end_rest(job)

    async def signal(self, job: Job, signum: int, by: str) -> None:
        """Send a signal to every command of a job; SIGTERM and SIGKILL end the job and its moves.

        SIGTERM and SIGKILL return at once. Any other signal returns when it has arrived, or after
        ANSWER_S seconds; it is then still sent. The history names each capsule that it missed.
        """
        _note_asked(job, signum)
        if signum in (signal.SIGTERM, signal.SIGKILL):
            self._stop(job, by, kill=signum == signal.SIGKILL)
        else:
            sending = asyncio.ensure_future(self._send(job, signum))
            self._tasks.keep(sending)
            await asyncio.wait({sending}, timeout=ANSWER_S)

    def end_rest(self, job: Job) -> None:
        """End the capsules that are left of a job that must end. If a capsule has failed, the
        others first get ``timeouts.grace`` seconds to end by themselves."""
        failed = any(capsule.code for capsule in job.capsules.values())
        wait = self._fleet.cluster.timeouts.grace if failed else 0.0
        self._wish(job, "", time.monotonic() + wait)

    # ---- a job that must end --------------------------------------------------------------------

    def _stop(self, job: Job, by: str, *, kill: bool) -> None:
        if job.state == "ended":
            return
        if job.state in ("running", "rewinding", "suspended"):
            try:
                self._fleet.journal.set_job(job.name, "ending", job.code)
            except LiveshiftError as error:  # a full disk must not prevent the end of a job
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
                    self._cancel_work(job, wish.by or "the end of its job")
                    await self._end_those_up(job, wish)
                await asyncio.sleep(LOOK_S)
        finally:
            del self._wishes[job.name]

    def _cancel_work(self, job: Job, by: str) -> None:
        """Cancel the migrations of a job, and the snapshot that is being taken of it."""
        for migration in self._fleet.moves_of(job):
            with contextlib.suppress(Refused):  # committed: the capsule ends at its destination
                migration.cancel(by)
        if (snapshot := self._fleet.snapshots.get(job.name)) is not None:
            snapshot.abandon(by)

    async def _end_those_up(self, job: Job, wish: _Wish) -> None:
        """Send SIGTERM to capsules that had none, and SIGKILL ``timeouts.grace`` seconds later."""
        grace, now = self._fleet.cluster.timeouts.grace, time.monotonic()
        left = [c for c in job.capsules.values() if c.code is None and self._fleet.is_up(c.host)]
        waiting = [c for c in left if c.name not in wish.terminated]
        if waiting and not wish.kill and (now > wish.begin + grace or not self._frozen(waiting)):
            sent = await self._all(waiting, signal.SIGTERM)
            wish.terminated |= {c.name: now for c, error in sent if error is None}
        late = [c for c in left if wish.kill or now > wish.terminated.get(c.name, now) + grace]
        again = now - self._fleet.cluster.timeouts.heartbeat
        due = [c for c in late if wish.killed.get(c.name, 0.0) < again]
        sent = await self._all(due, signal.SIGKILL)
        wish.killed |= {c.name: now for c, error in sent if error is None}

    # ---- other signals -------------------------------------------------------------------------

    async def _send(self, job: Job, signum: int) -> None:
        async with self._turns[job.name]:  # one signal after the other
            waiting = list(job.capsules.values())
            limits, began = self._fleet.cluster.timeouts, time.monotonic()
            while waiting := [c for c in waiting if c.code is None]:
                took = time.monotonic() - began
                last = took > max(limits.grace, limits.standstill)
                if took > limits.grace or not self._frozen(waiting):
                    sent = await self._all(waiting, signum)
                    _note_asked(job, signum)  # a snapshot may have come before it
                    waiting = self._not_reached(signum, sent, last=last)
                await asyncio.sleep(LOOK_S)

    def _not_reached(
        self, signum: int, sent: Iterable[tuple[Capsule, LiveshiftError | None]], *, last: bool
    ) -> list[Capsule]:
        """Return the capsules that need the signal again; none after the last attempt. No capsule
        gets the signal twice."""
        again = []
        for capsule, error in sent:
            if error is None:
                continue
            if isinstance(error, _OnTheMove) and not last:
                again.append(capsule)
                continue
            name = signal.Signals(signum).name
            text = f"{name} may not have reached it on {capsule.host}: {error}"
            log.warning("%s: %s", capsule.name, text)
            self._fleet.journal.note(capsule.name, "signal", text)
        return again

    def _frozen(self, capsules: Iterable[Capsule]) -> bool:
        """Whether one of them may be frozen or on its way, and both of its hosts are up."""
        found = (self._fleet.migrations.get(c.migration) for c in capsules if c.migration)
        return any(
            each.step in FROZEN and all(map(self._fleet.is_up, (each.source, each.destination)))
            for each in found
            if each is not None
        )

    async def _all(
        self, capsules: Iterable[Capsule], signum: int
    ) -> list[tuple[Capsule, LiveshiftError | None]]:
        """Send to all at the same time; return the error of each, or None."""
        of = list(capsules)
        return list(zip(of, await asyncio.gather(*(self._one(c, signum) for c in of)), strict=True))

    async def _one(self, capsule: Capsule, signum: int) -> LiveshiftError | None:
        request: messages.Message = messages.Signal(capsule.name, signum)
        if signum == signal.SIGKILL:
            request = messages.End(capsule.name, capsule.epoch)
        host, migration = capsule.host, capsule.migration
        if not self._fleet.is_up(host):
            return Unreachable(f"{host} is lost")
        try:
            await self._switchboard.request(host, request, self._fleet.cluster.timeouts.suspicion)
        except LiveshiftError as error:
            found = self._fleet.find(capsule.name)
            frozen = found is not None and bool(found[0].taking)  # for a snapshot
            moving = migration or capsule.migration or capsule.host != host
            moving = moving or frozen or not capsule.granted
            nothing = moving and isinstance(error, Refused | NotFound)
            return _OnTheMove(str(error)) if nothing else error
        return None


def _note_asked(job: Job, signum: int) -> None:
    """Note that a person wants an end of the job from now on, if the signal asks for one."""
    if signum in ASKS_TO_END:
        job.end_asked = time.monotonic()
