# SPDX-License-Identifier: Apache-2.0
"""How the migrations that a host holds come to their end: the agent sends a claim for each copy and
applies the ruling (model/ownership.py).

It does so when the orchestrator orders it (Settle), and at every heartbeat without an order. So
neither a lost message nor a restart of either daemon leaves a copy behind.
"""

from __future__ import annotations

import asyncio
import logging

from ...errors import LiveshiftError, Refused
from .. import messages
from ..daemon.tasks import Tasks
from ..model.ownership import Ruling, Side
from .arrival.incoming_migration import IncomingMigration
from .arrival.restore_attempt import SendClaim
from .departure.outgoing_migration import OutgoingMigration
from .host import ran_here
from .host.capsule_table import CapsuleTable
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.rulings")


class Rulings:
    """Answers Settle. Both methods that send claims return what is left of the copy: "held",
    "runs", "ended" or "nothing"."""

    def __init__(
        self, capsule_table: CapsuleTable, registry: MigrationRegistry, send_claim: SendClaim
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._send_claim = send_claim
        self._tasks = Tasks()

    async def keep_claiming(self) -> None:
        """Once per heartbeat, send a claim for each copy that this host holds."""
        while True:
            await asyncio.sleep(self._capsule_table.cluster.timeouts.heartbeat)
            for name in self._registry.not_busy():  # each on its own: its disk may hang
                self._tasks.spawn(self._settle(name))

    async def _settle(self, name: str) -> None:
        try:
            await self.claim(name)
        except LiveshiftError as error:
            log.warning("%s is not settled yet: %s", name, error)
        except Exception:
            log.exception("%s is not settled yet", name)

    async def claim_now(self, request: messages.Settle) -> messages.Settled:
        """Claim on the orchestrator's order, after the work under way for that migration."""
        outgoing = self._registry.outgoing.get(request.migration)
        if outgoing is not None:
            outgoing.abandon()
        await self._registry.until_idle(request.migration)
        state = await self.claim(request.migration)
        here = self._capsule_table.capsules.get(request.capsule)
        if (
            state == "nothing"
            and here is not None
            and request.migration not in self._registry.outgoing
        ):
            state = "runs" if here.code is None and here.sandbox.alive() else "ended"
        return messages.Settled(state)

    async def claim(self, migration: str) -> str:
        """Send a claim and apply the ruling, unless work is under way; return the new state."""
        registry = self._registry
        if registry.is_busy(migration) or registry.is_undecided(migration):
            return "held"
        if (outgoing := registry.outgoing.get(migration)) is not None:
            with registry.working(migration):
                return await self._settle_outgoing(outgoing)
        if (incoming := registry.incoming.get(migration)) is not None:
            with registry.working(migration):
                return await self._settle_incoming(incoming)
        return "nothing"

    async def _settle_outgoing(self, outgoing: OutgoingMigration) -> str:
        name, resident = outgoing.resident.spec.name, outgoing.resident
        claim = messages.Claim(
            outgoing.migration,
            name,
            Side.LEAVING.value,
            resident.epoch,
            ready=True,
            rewinds=resident.overlay.rewinds,
        )
        ruled = await self._send_claim(claim)
        ruling = Ruling(ruled.ruling)
        if ruling is not Ruling.WAIT and ruled.epoch < resident.epoch:
            raise LiveshiftError(
                f"the ruling on {name} is of epoch {ruled.epoch}, and it has {resident.epoch}"
            )
        alive = resident.sandbox.alive()  # if not, it was killed while it was held
        if ruling is Ruling.WAIT:
            return "held" if alive else "nothing"
        if ruling is Ruling.RUN:
            return await self._let_go_on(outgoing, ruled.epoch, alive)
        if not outgoing.promised:  # the capsule ended by itself
            return await self._leave_ended(outgoing)
        return await self._remove_moved(outgoing)

    async def _let_go_on(self, outgoing: OutgoingMigration, epoch: int, alive: bool) -> str:
        name, resident = outgoing.resident.spec.name, outgoing.resident
        resident.epoch = epoch
        ran_here.remember(self._capsule_table.factory, name, epoch)
        await self._capsule_table.blocking(name, outgoing.thaw)
        self._registry.outgoing.pop(outgoing.migration, None)
        if not alive:
            self._capsule_table.ended(resident)
            return "ended"
        try:
            resident.note()
        except OSError as error:  # the capsule runs, and that is the answer
            log.error("%s: cannot note its epoch: %s", name, error)
        return "runs"

    async def _leave_ended(self, outgoing: OutgoingMigration) -> str:
        """Give up a migration whose capsule has ended here."""
        await self._capsule_table.blocking(outgoing.resident.spec.name, outgoing.thaw)
        self._registry.outgoing.pop(outgoing.migration, None)
        return "ended"

    async def _remove_moved(self, outgoing: OutgoingMigration) -> str:
        name, resident = outgoing.resident.spec.name, outgoing.resident
        if self._capsule_table.capsules.get(name) is resident:
            self._capsule_table.capsules.pop(name)
        await self._capsule_table.blocking(name, outgoing.finish)
        self._registry.outgoing.pop(outgoing.migration, None)
        if outgoing.gpus:  # so that the next heartbeat reports them free
            self._tasks.spawn(asyncio.to_thread(self._registry.devices.gpus.refresh))
        return "ended"

    async def _settle_incoming(self, incoming: IncomingMigration) -> str:
        name, resident = incoming.resident.spec.name, incoming.resident
        claim = messages.Claim(
            incoming.migration,
            name,
            Side.COMING.value,
            resident.epoch,
            ready=False,
            rewinds=resident.overlay.rewinds,
        )
        if Ruling((await self._send_claim(claim)).ruling) is not Ruling.END:
            return "held"
        await self._discard(incoming)
        return "ended"

    async def _discard(self, incoming: IncomingMigration) -> None:
        self._registry.receiver.forget(incoming.migration)
        # Before it takes its turn at the network: files of the image may wait for a disk.
        await asyncio.to_thread(incoming.inbox.close)
        async with self._capsule_table.network:
            name = incoming.resident.spec.name
            await self._capsule_table.blocking(name, incoming.discard)
        self._registry.incoming.pop(incoming.migration, None)

    # ---- after a rewind ------------------------------------------------------------------------

    async def drop_earlier(self, book: messages.Book) -> None:
        """Remove what migrations and snapshots hold here of a job from before the rewind that the
        book is of. The tasks of its capsules have ended.

        No ruling is needed: such a copy may never run again. Raises Refused if its tasks do not
        end, or the work on it. Then no other copy is built here, and the next call goes on.
        """
        held: dict[str, OutgoingMigration | IncomingMigration] = {
            **self._registry.outgoing,
            **self._registry.incoming,
        }
        for migration, each in held.items():
            resident = each.resident
            if resident.spec.job == book.job and resident.overlay.rewinds < book.rewinds:
                await self._drop(migration, resident)
        await self._registry.snapshots.drop_earlier(book, self._patience)

    @property
    def _patience(self) -> float:
        """Seconds for work on a copy to end, once its tasks have ended."""
        return self._capsule_table.cluster.timeouts.prepare / 2

    async def _drop(self, migration: str, resident: RunningCapsule) -> None:
        registry, name = self._registry, resident.spec.name
        if (leaving := registry.outgoing.get(migration)) is not None:
            leaving.abandon()
        resident.leaving = True
        await asyncio.to_thread(resident.end_silently)  # then the work under way on it fails
        limit = self._patience
        try:
            async with asyncio.timeout(limit):
                await registry.until_idle(migration)
        except TimeoutError:
            raise Refused(
                f"{migration} still works on {name}, {limit:g} s after {name} was ended"
            ) from None
        with registry.working(migration):
            if (outgoing := registry.outgoing.get(migration)) is not None:
                end = self._remove_moved if outgoing.promised else self._leave_ended
                await end(outgoing)
            elif (incoming := registry.incoming.get(migration)) is not None:
                await self._discard(incoming)
