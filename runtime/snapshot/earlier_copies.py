# SPDX-License-Identifier: Apache-2.0
"""Ends the copies of a job from before a rewind or a suspension, on every host that is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

from ...errors import LiveshiftError
from .. import messages
from ..messages.answers import expected
from ..model.jobs import Job
from ..model.ownership import may_restore
from .rewind_context import RewindContext


class EarlierCopies:
    """``before``: the hosts that had a capsule of the job. ``note`` adds a line to the job's
    history. ``check`` is called in each round; it raises once the copies need not be ended here."""

    def __init__(
        self,
        context: RewindContext,
        job: Job,
        before: Collection[str],
        note: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._context = context
        self._limits = context.cluster.timeouts
        self._job = job
        self._before = frozenset(before)
        self._note = note
        self._check = check
        self._ended: set[str] = set()
        self._noted: dict[str, str] = {}  # by host: the last line about it in the history

    async def end(
        self, targets: Callable[[], set[str]], then: Callable[[], Awaitable[None]]
    ) -> None:
        """Let all hosts end what they have. Await ``then`` and return once the hosts ``targets()``
        have done so, and one of those on which the job last ran as a whole (ownership.may_restore).
        Others that are up have ``timeouts.suspicion`` more: their copies are fenced already.
        """
        orders: dict[str, asyncio.Task[None]] = {}
        again: dict[str, float] = {}  # by host: when it is asked again
        beat, suspicion = self._limits.heartbeat, self._limits.suspicion
        enough: float | None = None  # since when those have done so that are needed
        try:
            while True:
                needed, whole = targets(), set(self._context.before(self._job))
                asked = {h for h in needed | whole | self._before if self._context.is_up(h)}
                for host in sorted(asked - self._ended - orders.keys()):
                    if again.get(host, 0.0) <= time.monotonic():
                        orders[host] = asyncio.ensure_future(self._order(host))
                if orders:
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(orders.values(), timeout=beat, return_when=first)
                now = time.monotonic()
                for host in [host for host, order in orders.items() if order.done()]:
                    orders.pop(host).result()
                    again[host] = now + beat
                if needed <= self._ended and may_restore(whole, self._ended):
                    enough = now if enough is None else enough
                    # One that is up and slow writes to shared files for a little longer.
                    if asked <= self._ended or now - enough > suspicion:
                        await then()
                        return
                else:
                    enough = None
                    if needed <= self._ended:
                        self._note_once("", self._waits(whole))
                self._check()
                if not orders:
                    await asyncio.sleep(beat)
        finally:
            for order in orders.values():
                order.cancel()

    def _waits(self, whole: set[str]) -> str:
        where = ", ".join(sorted(whole))
        text = f"waits until one of {where} has ended its copy: the job may train there"
        if self._job.state == "rewinding":  # a suspension takes nobody's word
            text += f". If one is dead: `liveshift rewind {self._job.name} --lost HOST`"
        return text

    async def _order(self, host: str) -> None:
        end = messages.EndEarlier(self._job.book())
        try:
            answer = await self._context.request(host, end, self._limits.prepare)
            ended = expected(messages.EarlierEnded, host, end, answer)
            self._job.ran_on.update(ended.ran)
            self._ended.add(host)
        except LiveshiftError as error:
            self._note_once(host, f"earlier copies are left on {host}: {error}")

    def _note_once(self, about: str, text: str) -> None:
        if self._noted.get(about) != text:
            self._noted[about] = text
            self._note(text)
