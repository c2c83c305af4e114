# SPDX-License-Identifier: Apache-2.0
"""Brings one capsule of a rewind back: a sandbox, the image from its holder, the restore.

A capsule that the orchestrator has not granted runs nowhere. So whatever fails before the grant is
tried again under a further epoch, which makes earlier attempts void. Once it is granted, a copy may
run, and only that host may have it: if it lacks the copy, the whole job is rewound again.

No attempt begins before a host that has the image says so. While none does, the capsule waits where
it is: another host would not help, and a holder may be away for days.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TypeVar

from ...errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from .. import messages
from ..config.timeouts import Timeouts
from ..journal.snapshot_tables import RewindRow
from ..messages import Message
from ..messages.answers import expected
from ..model.jobs import Capsule, Job
from ..model.snapshots import Generation, image_name, restore_name
from .rewind_context import RewindContext

log = logging.getLogger("liveshift.rewind")
M = TypeVar("M", bound=Message)

ATTEMPTS = 2
"""A host tries to bring a capsule back at most this many times in a row."""

MOST_RESTORES = 4
"""After this many failed restores the cause is taken to lie in the image."""

MOST_NOTED = 50
"""The history gets at most this many reasons why a capsule is not back: numbers in them change."""

SPARE_BYTES = 1 << 30
"""The target accepts twice the bytes of the image, and this many bytes more."""


class NotRestorable(LiveshiftError):
    """A capsule cannot be brought back from this snapshot, by any host."""


class RewoundCapsule:
    """One capsule on its way back. ``image_s``, ``restore_s``: seconds of the attempt that
    succeeded. ``recovered``: an earlier orchestrator may have begun."""

    def __init__(
        self,
        context: RewindContext,
        job: Job,
        capsule: Capsule,
        generation: Generation,
        row: RewindRow,
        *,
        recovered: bool,
    ) -> None:
        self.capsule = capsule
        self.image_s = self.restore_s = 0.0
        self._context = context
        self._job = job
        self._limits: Timeouts = context.cluster.timeouts
        self._image = image_name(generation.number, capsule.index)
        self._name = restore_name(row.number, capsule.index)
        self._kind = row.kind
        self._holders = list(generation.holders.get(capsule.name, ()))
        self._dumped_on, self._dumped_under = generation.owners[capsule.name]
        self._home = generation.home(capsule.name)  # "" once it has counted as a holder
        self._void = recovered  # whether an attempt under the present epoch may have begun
        self._tried: Counter[str] = Counter()
        self._restores_failed = 0
        self._noted: set[str] = set()
        self._own_failed = False  # whether the copy of the capsule's own host is of no use

    async def bring_back(self) -> None:
        """Return once the capsule runs, or has ended. Tries again as long as that may help.

        Raises NotRestorable.
        """
        while self.capsule.code is None:
            began = time.monotonic()
            try:
                image = None if self.capsule.granted else await self._find_image()
            except NotRestorable:
                raise
            except LiveshiftError as error:
                self._note(error)
                await asyncio.sleep(self._limits.heartbeat)
                continue
            try:
                if image is not None and not self.capsule.granted:
                    await self._send_image(*image)
                    self.image_s = time.monotonic() - began
                await self._restore()
                return
            except LiveshiftError as error:
                self._note(error)
                await asyncio.sleep(self._limits.heartbeat)
                self._prepare_next(error)

    # ---- one attempt ---------------------------------------------------------------------------

    async def _send_image(self, holder: str, facts: messages.HeldFacts) -> None:
        """Let the capsule's host build a sandbox, and ``holder`` send the image there."""
        capsule, host = self.capsule, self.capsule.host
        if self._void:
            self._context.commit(capsule, host, still=False)
        self._void = True
        reserve = messages.Reserve(
            self._name,
            self._job.spec(capsule, self._context.cluster),
            facts.survey.in_place() if host == self._dumped_on else facts.survey,
            facts.facts,
            holder,
            capsule.epoch,
            self._job.book(),
            2 * facts.image_bytes + SPARE_BYTES,
            dry_run=False,
            gpu=facts.gpu,
            dumped_under=self._dumped_under,
        )
        own = holder == host
        try:
            reserved = await self._request(host, reserve, self._limits.prepare, messages.Reserved)
        except Refused:
            # Perhaps for want of memory. From another host the image comes if the copy gives way.
            self._own_failed = own
            raise
        for warning in reserved.warnings:
            self._note_once(f"{capsule.name} on {host}: {warning}")
        forward = messages.ForwardHeld(
            self._image, self._name, capsule.name, host, reserved.endpoint
        )
        try:
            await self._request(holder, forward, self._limits.precopy, messages.Frozen)
        except LiveshiftError:
            self._own_failed = own
            raise

    async def _restore(self) -> None:
        """Let the tree be restored, claimed and run; the agent claims before it runs.

        Raises LiveshiftError once it is certain that nothing runs, or if the host was not let run
        it. A host that may run it is asked until it answers or is lost (Rewind gives up then).
        """
        capsule, limit = self.capsule, self._limits.restore
        began = time.monotonic()
        while True:
            restore = messages.RestoreCapsule(
                self._name, capsule.name, capsule.epoch, limit, self._limits.collective
            )
            answer = self._limits.answer(limit)
            try:
                await self._request(capsule.host, restore, answer, messages.Moved)
                self.restore_s = time.monotonic() - began
                return
            except StepFailed:  # the agent reports that nothing runs there
                self._context.commit(capsule, capsule.host, still=True)
                self._restores_failed += 1
                raise
            except NotFound as nothing:
                if not capsule.granted:
                    raise
                self._context.lacks(capsule, str(nothing))
            except LiveshiftError as error:
                if not capsule.granted:
                    raise
                log.warning("%s: %s", self._name, error)
            await asyncio.sleep(self._limits.heartbeat)

    # ---- who holds the image -------------------------------------------------------------------

    async def _find_image(self) -> tuple[str, messages.HeldFacts]:
        """Who gives the image: the capsule's own host if it has kept a copy, else a holder."""
        own = self.capsule.host
        if own == self._dumped_on and own not in self._holders and not self._own_failed:
            try:
                return own, await self._get(own)
            except LiveshiftError as none:
                log.info("%s: %s has no copy of %s: %s", self._name, own, self._image, none)
                self._own_failed = not isinstance(none, Unreachable)  # then it may have one
        holder = self._holder()
        return holder, await self._facts(holder)

    def _holder(self) -> str:
        """A holder that is up, if possible the capsule's own host. Raises Refused if none is."""
        up = [holder for holder in self._holders if self._context.is_up(holder)]
        if not up:
            raise Refused(
                f"no host that holds {self._image}, the image of {self.capsule.name}, is up:"
                f" {', '.join(self._holders)} would do",
                hint="start the agent there, if the host has run on",
            )
        own = self.capsule.host
        others = [holder for holder in up if holder != own]
        return own if own in up and not (self._own_failed and others) else others[0]

    async def _facts(self, holder: str) -> messages.HeldFacts:
        try:
            return await self._get(holder)
        except NotFound as gone:
            # The last one is the host that the capsule has left, and that lives: its links are cut,
            # or its GPU has failed.
            self._holders.remove(holder)
            if self._home and self._context.is_up(self._home):
                self._holders.append(self._home)
                self._home = ""
            if self._holders:
                raise
            text = f"no host has {self._image}, the image of {self.capsule.name}, any more: {gone}"
            raise NotRestorable(text) from gone

    async def _get(self, holder: str) -> messages.HeldFacts:
        get = messages.GetHeld(self._image, self.capsule.name)
        return await self._request(holder, get, self._limits.prepare, messages.HeldFacts)

    # ---- after a failure -----------------------------------------------------------------------

    def _prepare_next(self, error: LiveshiftError) -> None:
        """Choose the host for the next attempt, after one that has failed."""
        capsule = self.capsule
        if self._restores_failed >= MOST_RESTORES:
            raise NotRestorable(
                f"{capsule.name} could not be restored from {self._image}, tried"
                f" {self._restores_failed} times: {error}"
            )
        if capsule.granted or capsule.code is not None:
            return
        self._tried[capsule.host] += 1
        if self._tried[capsule.host] < ATTEMPTS:
            return
        try:
            host = self._context.another_host(capsule, self._tried)
            self._context.commit(capsule, host, still=False)
            self._void = False  # that commit has given it a new epoch
        except LiveshiftError:  # none: begin again where it is
            self._tried.clear()

    def _note(self, error: LiveshiftError) -> None:
        """Note in the history why the capsule is not back yet, each reason once: it may have to be
        tried for days, on one host after the other."""
        self._note_once(f"{self.capsule.name} is not back on {self.capsule.host} yet: {error}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < MOST_NOTED:
            self._noted.add(text)
            log.warning("%s: %s", self._name, text)
            self._context.note(self._job, self._kind.under_way, text)

    async def _request(self, host: str, message: Message, timeout: float, expect: type[M]) -> M:
        answer = await self._context.request(host, message, timeout)
        return expected(expect, host, message, answer)
