# SPDX-License-Identifier: Apache-2.0
"""Ends the copies of a job from before a rewind or a suspension, on every host that is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from ...errors import LiveshiftError
from .. import messages
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
        """
        while True:
            needed, whole = targets(), set(self._context.before(self._job))
            asked = needed | whole | self._before
            await self._order([h for h in sorted(asked - self._ended) if self._context.is_up(h)])
            if needed <= self._ended:
                if may_restore(whole, self._ended):
                    await then()
                    return
                where = ", ".join(sorted(whole))
                waits = f"waits until one of {where} has ended its copy: the job may train there"
                if self._job.state == "rewinding":  # a suspension takes nobody's word
                    waits += f". If one is dead: `liveshift rewind {self._job.name} --lost HOST`"
                self._note_once("", waits)
            self._check()
            await asyncio.sleep(self._context.cluster.timeouts.heartbeat)

    async def _order(self, hosts: Iterable[str]) -> None:
        limit = self._context.cluster.timeouts.prepare
        end = messages.EndEarlier(self._job.book())

        async def order(host: str) -> None:
            try:
                await self._context.request(host, end, limit)
                self._ended.add(host)
            except LiveshiftError as error:
                self._note_once(host, f"earlier copies are left on {host}: {error}")

        await asyncio.gather(*map(order, hosts))

    def _note_once(self, about: str, text: str) -> None:
        if self._noted.get(about) != text:
            self._noted[about] = text
            self._note(text)
