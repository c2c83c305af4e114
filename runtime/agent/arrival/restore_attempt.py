# SPDX-License-Identifier: Apache-2.0
"""One attempt to restore an incoming capsule: CRIU brings the tree up, the agent claims that it may
run, and then lets it run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ....criu_glue.criu.tool import Criu
from ....errors import LiveshiftError, StepFailed
from ...daemon.faultpoints import reached
from ...messages import Claim, Moved, RestoreCapsule, Ruled
from ...model.ownership import Ruling, Side
from ...model.stopwatch import Stopwatch
from ..host.capsule_table import CapsuleTable
from .incoming_migration import IncomingMigration

log = logging.getLogger("liveshift.destination")

RETRY_S = 0.05
"""A claim that got an error instead of a ruling is sent again after this many seconds."""

SendClaim = Callable[[Claim], Awaitable[Ruled]]
"""Sends a claim; raises LiveshiftError if the orchestrator does not answer."""


@dataclass(frozen=True)
class RestoreAttempt:
    """One attempt to restore ``incoming`` on this host; :meth:`run` has its steps in order."""

    incoming: IncomingMigration
    capsule_table: CapsuleTable
    send_claim: SendClaim
    criu: Criu

    async def run(self, request: RestoreCapsule) -> Moved:
        """Return once the capsule runs. After an error no task of it is left, and the attempt
        counts as failed."""
        try:
            return await self._run(request)
        except BaseException as error:
            self.incoming.fail(request.epoch, str(error))
            raise

    async def _run(self, request: RestoreCapsule) -> Moved:
        incoming, table, name = self.incoming, self.capsule_table, request.capsule
        watch = Stopwatch()
        # While CRIU works: the commit gave us the address, whether this attempt succeeds or not.
        located = asyncio.ensure_future(table.locate(incoming.location(request.epoch)))
        try:
            await table.blocking(
                name, lambda: incoming.bring_up(self.criu, watch, request.deadline)
            )
        finally:
            await asyncio.wait({located})
            if (error := located.exception()) is not None:
                log.warning("%s: locating %s here: %s", incoming.migration, name, error)
        if error is not None:
            await table.blocking(name, incoming.drop_tree)
            raise StepFailed("restore", f"its address could not be located here: {error}")
        await reached("destination.claiming")
        with watch.phase("grant", frozen=True):
            await self._wait_for_grant(request.epoch)
        return await table.blocking(
            name, lambda: incoming.let_run(watch, request.epoch, request.deadline)
        )

    async def _wait_for_grant(self, epoch: int) -> None:
        """Return when the tree may run; if it may not, drop the tree and raise StepFailed.

        This never gives up by itself: a lost answer does not mean that there was none.
        """
        incoming, table = self.incoming, self.capsule_table
        name = incoming.resident.spec.name
        rewinds = incoming.resident.overlay.rewinds
        side = Side.COMING.value
        claim = Claim(incoming.migration, name, side, epoch, ready=True, rewinds=rewinds)
        while True:
            try:
                ruled = await self.send_claim(claim)
            except LiveshiftError as error:
                log.warning("%s: may %s run here? %s", incoming.migration, name, error)
                await asyncio.sleep(RETRY_S)
                continue
            ruling = Ruling(ruled.ruling)
            if ruling is Ruling.RUN:
                incoming.grant(epoch)
                return
            if ruling is Ruling.END or ruled.epoch > epoch:  # another attempt is under way
                await table.blocking(name, incoming.drop_tree)
                raise StepFailed("restore", f"{name} may not run on {table.host} any more")
            await asyncio.sleep(table.cluster.timeouts.heartbeat)
