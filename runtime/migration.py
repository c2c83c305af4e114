# SPDX-License-Identifier: Apache-2.0
"""One planned migration, top to bottom: :meth:`Move.run` is the order of things, told once.

Before ``commit`` any failure leads to ``_roll_back``: the source runs on as if nothing had been.
After it the destination owns the capsule; if it cannot restore, ``_return`` passes the ownership
back under a further epoch and the tree, which the source has held frozen meanwhile, goes on there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from ..errors import LiveshiftError, StepFailed, Unreachable
from . import messages
from .config import Cluster
from .jobs import Capsule, Job
from .messages import Message, MigrationRow, Phase
from .steps import ALLOWED, Step

log = logging.getLogger("liveshift.migration")
M = TypeVar("M", bound=Message)

RESUME_WAIT_S = 5.0


class Ground(Protocol):
    """What a move stands on: the orchestrator, as far as a move may know it."""

    cluster: Cluster

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None: ...

    def commit(self, capsule: Capsule, host: str, epoch: int) -> None:
        """Durably pass the ownership; raises LiveshiftError if it was not ours to pass."""

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host."""


class Move:
    """A migration in flight, and its record when it is over."""

    def __init__(
        self, ground: Ground, number: int, job: Job, capsule: Capsule, destination: str,
        reason: str, by: str, changed: Callable[[Move], None],
    ) -> None:  # fmt: skip
        self.number = number
        self.name = f"m{number}"
        self.job = job
        self.capsule = capsule
        self.source = capsule.host
        self.destination = destination
        self.reason = reason
        self.by = by
        self.step = Step.PREPARING
        self.asked = time.time()
        self.error: LiveshiftError | None = None
        self._ground = ground
        self._changed = changed
        self._began = time.monotonic()
        self._ended: float | None = None
        self._phases: list[Phase] = []
        self._frozen_at: float | None = None
        self._frozen_s = 0.0
        self._expected = 0
        self._image_bytes = 0
        self._ship_s = 0.0
        self.bytes = 0

    async def run(self) -> None:
        """Move the capsule. Never raises: how it ended is in ``step`` and ``error``."""
        try:
            reserved = await self._prepare()
            await self._precopy(reserved)
            frozen = await self._freeze()
            self._commit()
        except Exception as error:
            await self._roll_back(_as_ours(error))
            return
        try:
            await self._restore(frozen)
        except Exception as error:
            await self._return(_as_ours(error))
            return
        await self._resume()
        await self._finish()

    # ---- the phases, in order -----------------------------------------------------------------

    async def _prepare(self) -> messages.Reserved:
        """Survey at the source, preflight and an empty room at the destination; nothing stops."""
        limit = self._ground.cluster.timeouts.prepare
        with self._timed("prepare") as detail:
            look = await self._ask(
                self.source, messages.Inspect(self.capsule.name), limit, messages.Inspected
            )
            self._expected = look.survey.resident + look.survey.shared_memory
            spec = self.job.spec(self.capsule, self._ground.cluster)
            reserve = messages.Reserve(
                self.name, spec, look.survey, look.facts, self.source, self.capsule.epoch + 1,
                self.job.book(), dry_run=False,
            )  # fmt: skip
            reserved = await self._ask(self.destination, reserve, limit, messages.Reserved)
            detail.append(f"{len(look.survey.pids)} tasks")
        return reserved

    async def _precopy(self, reserved: messages.Reserved) -> None:
        """Directories and output go over while the job trains."""
        self._advance(Step.PRECOPYING)
        precopy = messages.Precopy(
            self.name, self.capsule.name, self.destination, reserved.endpoint
        )
        began = time.monotonic()
        limit = self._ground.cluster.timeouts.freeze
        moved = await self._ask(self.source, precopy, limit, messages.Moved)
        self._take_phases(moved.phases, began)

    async def _freeze(self) -> messages.Frozen:
        """The job stands still from here: dump into the wire, held frozen at the source."""
        self._advance(Step.FREEZING)
        limit = self._ground.cluster.timeouts.freeze
        began = self._frozen_at = time.monotonic()
        freeze = messages.Freeze(self.name, self.capsule.name, limit)
        frozen = await self._ask(self.source, freeze, limit + 30, messages.Frozen)
        self._ship_s = time.monotonic() - began
        self._image_bytes = frozen.image_bytes
        self._take_phases(frozen.phases, began)
        return frozen

    def _commit(self) -> None:
        """One durable write; from here on only the destination may run the capsule."""
        with self._timed("commit", frozen=True):
            self._ground.commit(self.capsule, self.destination, self.capsule.epoch + 1)
        self._advance(Step.COMMITTED)

    async def _restore(self, frozen: messages.Frozen) -> None:
        """The address book and the tree, side by side; the hook opens the network in between."""
        self._advance(Step.RESTORING)
        limit = self._ground.cluster.timeouts.restore
        began = time.monotonic()
        restore = messages.Restore(self.name, self.capsule.epoch, frozen, limit)
        _, moved = await asyncio.gather(
            self._ground.publish(self.job),
            self._ask(self.destination, restore, limit + 30, messages.Moved),
        )
        self._take_phases(moved.phases, began)
        self._thawed()

    async def _resume(self) -> None:
        """The tree runs at the destination; wait a while for its first collective."""
        self._advance(Step.RESUMING)
        began = time.monotonic()
        with contextlib.suppress(Exception):  # it runs; that nobody saw it changes nothing
            ask = messages.Resume(self.capsule.name, RESUME_WAIT_S)
            seen = await self._ask(self.destination, ask, RESUME_WAIT_S + 5, messages.Moved)
            self._take_phases(seen.phases, began)

    async def _finish(self) -> None:
        """Kill the frozen copy. It may not run in any case: its network is locked and its epoch
        is over; so a source that does not answer is asked again, not waited for."""
        self._advance(Step.FINISHING)
        with self._timed("finish"):
            for _ in range(5):
                try:
                    finish = messages.Finish(self.name, self.capsule.name)
                    await self._ground.ask(self.source, finish, 30)
                    break
                except Exception as error:
                    log.warning("%s: the source does not finish: %s", self.name, error)
                    await asyncio.sleep(1)
        self._end(Step.DONE)

    # ---- when something fails ------------------------------------------------------------------

    async def _roll_back(self, error: LiveshiftError) -> None:
        """Not committed: the source goes on, the destination forgets."""
        self.error = error
        self._advance(Step.ROLLING_BACK)
        await self._undo(self.capsule.epoch)
        self._end(Step.FAILED)

    async def _return(self, error: LiveshiftError) -> None:
        """Committed but not restored: nothing runs at the destination; the source gets it back."""
        self.error = error
        self._advance(Step.RETURNING)
        with contextlib.suppress(Exception):
            discard = messages.Discard(self.name, self.capsule.name)
            await self._ground.ask(self.destination, discard, 60)
        try:
            self._ground.commit(self.capsule, self.source, self.capsule.epoch + 1)
            await self._ground.publish(self.job)
            thaw = messages.Thaw(self.name, self.capsule.name, self.capsule.epoch)
            await self._ground.ask(self.source, thaw, 60)
        except Exception as worse:
            self.error = StepFailed("restore", f"{error}; and back at {self.source}: {worse}")
            self._end(Step.LOST)
            return
        self._thawed()
        self._end(Step.FAILED)

    async def _undo(self, epoch: int) -> None:
        for host, message in (
            (self.source, messages.Thaw(self.name, self.capsule.name, epoch)),
            (self.destination, messages.Discard(self.name, self.capsule.name)),
        ):
            try:
                await self._ground.ask(host, message, 60)
            except Exception as problem:
                log.warning("%s: rolling back at %s: %s", self.name, host, problem)
            self._thawed()  # with the first: the destination's answer is not waited for

    # ---- book-keeping --------------------------------------------------------------------------

    def row(self) -> MigrationRow:
        """The migration as it stands, for status, events and reports."""
        now = self._ended or time.monotonic()
        frozen = self._frozen_s
        if self._frozen_at is not None:
            frozen = now - self._frozen_at
        return MigrationRow(
            name=self.name, capsule=self.capsule.name, source=self.source,
            destination=self.destination, reason=self.reason, by=self.by,
            epoch=self.capsule.epoch, state=self.step.value, asked=self.asked,
            seconds=now - self._began, frozen_s=frozen, image_bytes=self._image_bytes,
            bytes=self.bytes, expected_bytes=self._expected,
            link_rate=self._image_bytes / self._ship_s if self._ship_s else 0.0,
            phases=list(self._phases),
            error=str(self.error) if self.error else None,
            hint=self.error.hint if self.error else None,
        )  # fmt: skip

    async def _ask(self, host: str, message: Message, timeout: float, expect: type[M]) -> M:
        answer = await self._ground.ask(host, message, timeout)
        if not isinstance(answer, expect):
            raise Unreachable(f"{host} answered {type(message).__name__} with {answer!r}")
        return answer

    def _advance(self, to: Step) -> None:
        assert to in ALLOWED[self.step], f"{self.step} may not become {to}"
        self.step = to
        try:
            self._changed(self)
        except Exception:  # a record for people: who owns the capsule is the commit's alone
            log.exception("%s: cannot record that it is %s", self.name, to.value)

    def _end(self, how: Step) -> None:
        self._ended = time.monotonic()
        self._advance(how)

    def _thawed(self) -> None:
        if self._frozen_at is not None:
            self._frozen_s = time.monotonic() - self._frozen_at
            self._frozen_at = None

    @contextlib.contextmanager
    def _timed(self, name: str, frozen: bool = False) -> Iterator[list[str]]:
        start, detail = time.monotonic(), list[str]()
        try:
            yield detail
        finally:
            seconds = time.monotonic() - start
            self._phases.append(
                Phase(name, start - self._began, seconds, None, frozen, ", ".join(detail))
            )

    def _take_phases(self, phases: list[Phase], began: float) -> None:
        """Phases timed by an agent, moved to this migration's own clock (which asked at began)."""
        offset = began - self._began
        self._phases += [
            Phase(p.name, p.start + offset, p.seconds, p.bytes, p.frozen, p.detail) for p in phases
        ]


def _as_ours(error: Exception) -> LiveshiftError:
    if isinstance(error, LiveshiftError):
        return error
    log.exception("a migration met an error that nobody foresaw", exc_info=error)
    return StepFailed("migration", f"{type(error).__name__}: {error}")
