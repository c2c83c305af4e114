# SPDX-License-Identifier: Apache-2.0
"""Begins migrations, plans them for --dry-run, and stands behind those under way (Ground)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..errors import Refused, Unreachable
from . import messages
from .config import Cluster
from .fleet import Fleet
from .jobs import Capsule, Job
from .link import Switchboard
from .messages import Message
from .migration import Move
from .spares import choose_destination
from .steps import Step
from .tasks import Tasks

log = logging.getLogger("liveshift.moves")

LIVENESS_LOOK_S = 0.5


class Moves:
    """All migrations of the cluster."""

    def __init__(
        self, fleet: Fleet, switchboard: Switchboard,
        over: Callable[[Move], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.cluster: Cluster = fleet.cluster
        self._fleet = fleet
        self._switchboard = switchboard
        self._over = over
        self._tasks = Tasks()

    def start(self, job: Job, capsule: Capsule, to: str, reason: str, by: str) -> Move:
        """Begin to move a capsule; raises Refused, NotFound or Unreachable with nothing begun."""
        destination, why = self._destination(job, capsule, to)
        journal = self._fleet.journal
        number = journal.next_migration()
        move = Move(self, number, job, capsule, destination, reason, by, self._changed)
        capsule.migration = move.name
        self._fleet.moves[move.name] = move
        journal.save_migration(number, move.row())
        journal.tell(
            capsule.name, "move", f"{capsule.host} → {destination} begins ({why}): {reason}", by
        )
        self._tasks.spawn(self._follow(move))
        return move

    async def plan(self, job: Job, capsule: Capsule, to: str) -> messages.Planned:
        """What a move would do and find; nothing is changed. Raises what the move would."""
        destination, why = self._destination(job, capsule, to)
        limit = self.cluster.timeouts.prepare
        look = await self.ask(capsule.host, messages.Inspect(capsule.name), limit)
        assert isinstance(look, messages.Inspected)
        reserve = messages.Reserve(
            "plan", job.spec(capsule, self.cluster), look.survey, look.facts, capsule.host,
            capsule.epoch + 1, job.book(), dry_run=True,
        )  # fmt: skip
        reserved = await self.ask(destination, reserve, limit)
        assert isinstance(reserved, messages.Reserved)
        checks = [("destination", f"{destination}, {why}"), *reserved.checks]
        size = look.survey.resident + look.survey.shared_memory
        return messages.Planned(
            capsule.name, capsule.host, destination, checks, size, look.carried_bytes
        )

    # ---- Ground: what a move stands on ---------------------------------------------------------

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        """Raises Unreachable also when the host falls silent: a dead one is not waited for."""
        answer = asyncio.ensure_future(self._switchboard.ask(host, message, timeout))
        while not (await asyncio.wait({answer}, timeout=LIVENESS_LOOK_S))[0]:
            if not self._fleet.is_up(host):
                answer.cancel()
                raise Unreachable(f"{host} fell silent during {type(message).__name__}")
        return answer.result()

    def commit(self, capsule: Capsule, host: str, epoch: int) -> None:
        self._fleet.journal.commit(capsule.name, host, epoch)
        capsule.host, capsule.epoch = host, epoch

    async def publish(self, job: Job) -> None:
        """Every host hears where the job's addresses are; one that is away hears it on Hello."""
        book = messages.Locate(job.book())
        limit = self.cluster.timeouts.suspicion
        names = self._fleet.up()
        done = await asyncio.gather(
            *(self.ask(name, book, limit) for name in names), return_exceptions=True
        )
        for name, result in zip(names, done, strict=True):
            if isinstance(result, BaseException):
                log.warning("address book of %s at %s: %s", job.name, name, result)

    # ---- one move ------------------------------------------------------------------------------

    def _destination(self, job: Job, capsule: Capsule, to: str) -> tuple[str, str]:
        if capsule.migration:
            raise Refused(
                f"{capsule.name} is moving already ({capsule.migration})",
                hint=f"`liveshift events {capsule.migration}` shows how it goes",
            )
        if capsule.code is not None or job.state == "ended":
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        if not self._fleet.is_up(capsule.host):
            raise Unreachable(
                f"the agent on {capsule.host}, where {capsule.name} runs, does not answer",
                hint=f"start it there: liveshift agent --config FILE --host {capsule.host}",
            )
        chosen, why = choose_destination(self._fleet.views(), capsule.name, capsule.host, to)
        return chosen.name, why

    async def _follow(self, move: Move) -> None:
        await move.run()
        move.capsule.migration = None
        row = move.row()
        if move.step is Step.DONE:
            kind = "moved"
            text = (
                f"{move.source} → {move.destination}: stood still {row.frozen_s:.2f} s, "
                f"image {row.image_bytes / 1e6:.0f} MB"
            )
        else:
            kind = "not moved"
            text = f"{move.source} → {move.destination} {move.step.value}: {row.error}"
        self._fleet.journal.tell(move.capsule.name, kind, text, move.by, move.number)
        await self._over(move)

    def _changed(self, move: Move) -> None:
        self._fleet.journal.save_migration(move.number, move.row())
