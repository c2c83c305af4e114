# SPDX-License-Identifier: Apache-2.0
"""A migration to another host: :meth:`HostMigration.run` has all steps in order. The steps during
which the job trains are in before_pause.py.

Before the commit any failure leads to ``_roll_back``: the source runs on as if nothing had
happened. After the commit the capsule must run somewhere. The destination may try the restore
again. If it fails, the source gets the capsule back (``_return``), under a new epoch, from the tree
that it still holds frozen. Where a copy may already run, the move waits for that host and gives the
capsule to no other host.

ownership.rule alone decides what each side does with its copy: ``Settle`` only makes an agent send
its claim now. So a move may end while a host is out of reach: the host's agent does the rest by
itself when it is back.

A rewind of the job ends the move at once, unless the move may save the capsule whose host is lost
(:attr:`.Migration.may_save`). One that can only wait says for what (:attr:`.Migration.waits`), and
saves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import msgspec

from ...errors import LiveshiftError, NotFound, Refused, SourceFailed, StepFailed, Unreachable
from .. import messages
from ..daemon.faultpoints import reached
from ..messages import MigrationRow
from ..model.ownership import BEFORE_COMMIT, MAY_SAVE
from ..model.steps import ALLOWED, MigrationStep
from ..model.timeline import Timeline
from . import second_look
from .before_pause import BeforePause
from .context import Gone, MigrationContext, as_ours
from .order import Order

log = logging.getLogger("liveshift.migration")

ATTEMPTS = 2
"""A destination tries a restore at most this many times."""


class HostMigration(BeforePause):
    """A HostMigration moves one capsule from the host ``source`` to the host ``destination``.
    ``tried``: the hosts that could not restore the image. ``released``: whether the source was
    allowed to run the capsule again; after that the destination cannot get it."""

    kind = "move"
    allowed = ALLOWED
    cancellable = BEFORE_COMMIT

    def __init__(self, context: MigrationContext, number: int, order: Order) -> None:
        super().__init__(context, number, order)
        self.tried: set[str] = set()
        self.released = False  # the source got the ruling "run", so its promise is over
        self._answered = False  # the destination has said whether its image is complete
        self._closed = False  # the destination's image stays incomplete
        self._may_be_complete = False  # the image, in a move that is rolled back

    @classmethod
    def from_row(cls, context: MigrationContext, order: Order, row: MigrationRow) -> HostMigration:
        """Return a migration that an earlier orchestrator has left under way, for :meth:`recover`.
        ``order`` names the destination of the row."""
        here = cls(context, int(row.name[1:]), order)
        here.source, here.step, here.times = row.source, MigrationStep(row.state), Timeline.of(row)
        here.precopy, here.predicted = row.precopy, row.predicted
        here.released = here.step is MigrationStep.ROLLING_BACK  # the source may have its ruling
        here._may_be_complete = here.released
        before_gates = (MigrationStep.PREPARING, MigrationStep.PRECOPYING)
        here.holds_gates = here.step not in before_gates  # it may hold them
        return here

    @property
    def may_save(self) -> bool:
        if self.step is MigrationStep.ROLLING_BACK:
            return self._may_be_complete
        return self.step in MAY_SAVE

    async def run(self) -> None:
        try:
            await self._unless_cancelled(self._until_commit())
        except Exception as error:
            await self._roll_back(as_ours(error), self.step is MigrationStep.FREEZING)
            return
        await self._from_commit()

    async def _until_commit(self) -> None:
        reserved = await self._prepare()
        await reached("orchestrator.prepared")
        await self._precopy(reserved)
        await self._place_ahead()
        self._check_time()
        await reached("orchestrator.precopied")
        await self._quiesce()
        await self._freeze()
        await reached("orchestrator.frozen")
        self._commit()

    async def recover(self) -> None:
        if self.step in (MigrationStep.RESUMING, MigrationStep.FINISHING):
            await self._finish()
        elif self.step is MigrationStep.RETURNING or self.capsule.host != self.source:
            await self._from_commit()
        else:
            may_be_complete = self.step in (
                MigrationStep.QUIESCING,
                MigrationStep.FREEZING,
                MigrationStep.ROLLING_BACK,
            )
            if self.step is MigrationStep.QUIESCING:
                # The journal learns of a freeze a little later than the source. A source that
                # freezes is free to answer only once the destination has refused its image.
                self._advance(MigrationStep.FREEZING)
            error = StepFailed("migration", "the orchestrator was restarted")
            await self._roll_back(error, may_be_complete)

    async def _from_commit(self) -> None:
        """Make the capsule run on some host, even if steps fail, unless its last copy is gone."""
        await reached("orchestrator.committed")
        while self.step is MigrationStep.RETURNING or not await self._restored():
            if self.step is MigrationStep.LOST:
                return
            if self.step is MigrationStep.RESTORING:  # the image is at another spare now
                continue
            if await self._return():
                return
        await self._resume()
        await reached("orchestrator.resumed")
        await self._finish()

    # ---- the phases, in order -----------------------------------------------------------------

    async def _freeze(self) -> None:
        """Freeze the capsule and send its image; the source keeps the tree frozen.

        A source that falls silent may have completed the image before. Then the source waits or is
        dead, and the move goes on without its answer.
        """
        self._advance(MigrationStep.FREEZING)
        began = self.times.freeze()
        limit = self._freeze_budget.for_freeze(began)
        freeze = messages.Freeze(self.name, self.capsule.name, limit)
        try:
            frozen = await self._request(
                self.source, freeze, self._limits.answer(limit), messages.Frozen
            )
        except Unreachable as silent:
            await self._until_image_grows_no_more(silent)
            raise
        self.times.shipped(frozen.image_bytes)
        self.times.answered(frozen.phases, began, self.source)
        self._note_device_path(frozen.phases)

    async def _until_image_grows_no_more(self, silent: Unreachable) -> None:
        """Wait until the image is complete or grows no more: a source that the orchestrator cannot
        reach may still send to the destination."""
        before = -1
        while self._freeze_budget.allows_retry(time.monotonic()):
            seen = await self._progress(close=False)
            if seen.complete or seen.bytes == before:
                return
            log.warning("%s: %s; %d bytes have come", self.name, silent, seen.bytes)
            before = seen.bytes
            await asyncio.sleep(self._limits.suspicion)

    def _pass_to(self, host: str, *, still: bool) -> None:
        """Durably pass the ownership to ``host`` (MigrationContext.commit), unless a rewind has
        overtaken the move: the capsule's row is the rewind's then."""
        if self.step is MigrationStep.REWOUND:
            raise Refused(f"{self.name} is over: {self.error}")
        self._context.commit(self.capsule, host, still=still)
        self.waits = ""

    def _commit(self) -> None:
        """Commit: after this durable write only the destination may run the capsule."""
        with self.times.phase("commit", frozen=True):
            self._pass_to(self.destination, still=True)
        self._advance(MigrationStep.COMMITTED)

    async def _restored(self) -> bool:
        """Restore; return True if the capsule runs at the destination. Else the capsule is lost,
        another spare has the image (RESTORING), or the source must get it back (RETURNING)."""
        try:
            await self._restore()
            return True
        except Exception as error:
            self.error = as_ours(error)
        if isinstance(self.error, Gone) and self.capsule.granted:
            await self._end(MigrationStep.LOST)
        elif not await self._passed_on():
            self._advance(MigrationStep.RETURNING)
        return False

    async def _passed_on(self) -> bool:
        """Let a destination that cannot restore the image pass it to another spare; return True if
        that spare has the image and owns the capsule."""
        now = time.monotonic()
        if self._inspected is None or not isinstance(self.error, StepFailed):
            return False
        if isinstance(self.error, SourceFailed):  # another host would fail as well
            return False
        if not self._freeze_budget.allows_passing_on(now):
            return False
        self.tried.add(self.destination)
        try:
            spare = self._context.another_spare(self)
            self._context.note(self, f"passes the image on to {spare}, because {self.error}")
            with self.times.phase("pass on", frozen=True):
                limit = self._freeze_budget.for_passing_on(time.monotonic())
                survey = second_look.without(self._inspected.survey)
                inspected = msgspec.structs.replace(self._inspected, survey=survey)
                reserved = await self._reserve(inspected, self.destination, spare, limit)
                forward = messages.Forward(self.name, self.capsule.name, spare, reserved.endpoint)
                limit = self._freeze_budget.for_passing_on(time.monotonic())
                await self._request(self.destination, forward, limit, messages.Frozen)
            self._pass_to(spare, still=False)
        except Refused:
            return False
        except Exception as error:
            self._context.note(self, f"could not pass the image on: {error}")
            return False
        self.destination = spare
        self._advance(MigrationStep.RESTORING)
        return True

    async def _restore(self) -> None:
        """Publish the address book while the destination restores the tree; the agent there claims
        the capsule before the tree runs.

        Raises an error only once it is certain that nothing runs at the destination.
        """
        self._advance(MigrationStep.RESTORING)
        failed = 0
        while True:
            began = time.monotonic()
            limit = self._restore_limit(ATTEMPTS - failed)
            restore = messages.RestoreCapsule(
                self.name, self.capsule.name, self.capsule.epoch, limit, self._limits.collective
            )
            try:
                published = asyncio.ensure_future(self._context.publish(self.job))
                published.add_done_callback(lambda done: done.cancelled() or done.exception())
                moved = await asyncio.ensure_future(
                    self._request(
                        self.destination, restore, self._limits.answer(limit), messages.Moved
                    )
                )
                self.waits = ""
                self.times.answered(moved.phases, began, self.destination)
                with self.times.phase("address book", frozen=True) as detail:
                    detail.append("the part that was sent after the restore")
                    await published
                break
            except StepFailed as error:  # the agent reports that nothing runs there
                # A new epoch ends every ruling that was given for the failed attempt.
                self._pass_to(self.destination, still=True)
                failed += 1
                again = failed < ATTEMPTS and not isinstance(error, SourceFailed)
                if not again or not self._freeze_budget.allows_retry(time.monotonic()):
                    raise
                self._context.note(
                    self, f"tries the restore again on {self.destination}, because {error}"
                )
            except NotFound as nothing:
                raise Gone(str(nothing), hint=nothing.hint) from nothing
            except LiveshiftError as error:
                if not self.capsule.granted:
                    raise
                if not failed:
                    self._context.note(self, f"waits for {self.destination}, where it may run")
                    failed = 1
                self.waits = self.destination
                log.warning("%s: %s", self.name, error)
                await asyncio.sleep(self._limits.heartbeat)
        self.error = None

    def _restore_limit(self, attempts: int) -> float:
        """Return the seconds for one of ``attempts`` restores, so that the source gets its turn
        before the freeze must end. Attempts have no end only if the capsule may run at the
        destination already, or the source could not take it back."""
        limit = self._freeze_budget.for_restore(time.monotonic(), max(1, attempts))
        return max(limit, 2 * self._limits.suspicion)

    async def _finish(self) -> None:
        """Let the source remove its frozen copy. Do not wait for a source that does not answer: the
        copy can do no harm, because its epoch is over and the fence drops its frames."""
        self._advance(MigrationStep.FINISHING)
        with self.times.phase("finish") as detail:
            try:
                await self._settle_copy(self.source)
            except LiveshiftError as error:
                detail.append("when the source is back")
                self._context.note(
                    self, f"the frozen copy ends once {self.source} is back: {error}"
                )
        await self._end(MigrationStep.DONE)

    # ---- when something fails ------------------------------------------------------------------

    async def _roll_back(self, error: LiveshiftError, may_be_complete: bool) -> None:
        """End a move that is not committed: the source runs on, the destination removes its part.

        Exception: if the image is complete and the source has not been ruled to run, the source
        keeps its promise to wait, so the move goes on, even if the source is gone. While both sides
        are silent, nothing is decided, unless the job is rewound. A cancelled move goes on only if
        its source is silent or has lost the capsule.
        """
        self.error, self._may_be_complete = error, may_be_complete
        frozen = self.step is MigrationStep.FREEZING and isinstance(error, StepFailed)
        at_once = self.step is MigrationStep.FREEZING and self._cancelled is None
        if at_once and await self._commit_if_complete():
            await self._from_commit()
            return
        self._advance(MigrationStep.ROLLING_BACK)
        while True:
            try:
                state = await self._settle_copy(self.source)
            except Exception as problem:
                log.warning("%s: rolling back at %s: %s", self.name, self.source, problem)
                state = "unknown"
            if may_be_complete and state in ("unknown", "nothing"):
                if await self._commit_if_complete():
                    await self._from_commit()
                    return
                decided = self._closed if state == "unknown" else self._answered
                if not decided and self.capsule.code is None:
                    self.waits = f"{self.source} or {self.destination}"
                    await asyncio.sleep(self._limits.heartbeat)
                    continue
            break
        self.waits = ""
        if state == "unknown":
            self._context.note(self, f"{self.source} goes on once it is back")
        self.times.thaw()
        if state == "nothing" and self.capsule.code is None:  # the source was switched off, say
            await self._end(MigrationStep.LOST)
        else:
            # A frozen capsule cannot end by itself: the move ended it, and ``error`` says why.
            await self._end_undone(ended=state == "ended", because=str(error) if frozen else "")
        with contextlib.suppress(Exception):  # the destination also claims by itself
            await self._settle_copy(self.destination)

    async def _commit_if_complete(self) -> bool:
        """Ask the destination for the image, and make it refuse what is still missing. If the image
        is complete, commit the capsule to the destination and return True."""
        try:
            seen = await self._progress(close=True)
            self._answered, self._closed = True, not seen.complete
            if self._closed or self.released or self.capsule.code is not None:
                return False
            self._pass_to(self.destination, still=True)
        except Exception as error:
            log.warning("%s: is the image complete? %s", self.name, error)
            return False
        self._context.note(self, f"the image is complete, so it moves on: {self.error}")
        self.times.shipped(seen.image_bytes)
        self._advance(MigrationStep.COMMITTED)
        return True

    async def _return(self) -> bool:
        """Give the capsule back to the source, if the source still has it: nothing runs at the
        destination. Returns False if the move has not ended; then the destination tries again.
        """
        try:
            if self.capsule.host != self.source and await self._settle_copy(self.source) == "held":
                self._pass_to(self.source, still=False)
            if self.capsule.host == self.source:
                await self._context.publish(self.job)
                if await self._returned():
                    self.times.thaw()
                    await self._end(MigrationStep.FAILED)
                    return True
            at_source = self.capsule.host == self.source
            if isinstance(self.error, Gone) or (at_source and self.capsule.granted):
                self.error = Gone(f"{self.error}; and {self.source} has no copy either")
                await self._end(MigrationStep.LOST)
                return True
            if self.capsule.host == self.source:
                self._pass_to(self.destination, still=False)
        except Exception as error:
            log.warning("%s: returning to %s: %s", self.name, self.source, error)
        self.waits = f"{self.source} or {self.destination}"
        await asyncio.sleep(self._limits.heartbeat)  # neither host can run it now: try again later
        if self.capsule.host == self.destination:
            self._advance(MigrationStep.RESTORING)
        return False

    async def _returned(self) -> bool:
        """Return whether the capsule runs at its source, which owns it. After a grant only the
        source knows, so wait for it."""
        while True:
            try:
                state = await self._settle_copy(self.source)
                if state != "held":
                    return state in ("runs", "ended")
            except LiveshiftError as error:
                log.warning("%s: waiting for %s: %s", self.name, self.source, error)
                if not self.capsule.granted and not isinstance(self.error, Gone):
                    return False  # the destination still has an image
            self.waits = self.source
            await asyncio.sleep(self._limits.heartbeat)

    async def _settle_copy(self, host: str) -> str:
        settle = messages.Settle(self.name, self.capsule.name)
        limit = self._limits.prepare
        return (await self._request(host, settle, limit, messages.Settled)).state
