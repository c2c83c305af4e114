# SPDX-License-Identifier: Apache-2.0
"""The departures and arrivals that a host holds for migrations, and how each of them ends.

The orchestrator asks for the steps of a migration one by one (source.py, destination.py). The
porter settles what this host holds by sending a claim (:meth:`MigrationRegistry.settle`): when the
orchestrator orders it, and at every heartbeat without an order. So neither a lost message nor a
restart of either daemon leaves a copy behind. The answer is a ruling of the journal (ownership.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from ...criu_glue.criu import kernel_data
from ...criu_glue.criu.tool import Criu
from ...criu_glue.survey.found import Survey
from ...criu_glue.survey.survey import survey
from ...errors import LiveshiftError, NotFound, Refused
from .. import messages
from ..config.choices import SealChoice
from ..daemon.tasks import Tasks
from ..model.ownership import Ruling, Side
from ..wire import Lanes, Receiver, Sender
from .arrival.incoming_migration import IncomingMigration
from .departure import outgoing_migration as leaving
from .departure.outgoing_migration import OutgoingMigration
from .gpu.devices import Devices
from .gpu.reservations import GpuReservations
from .gpu.watch import GpuWatch
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.running_capsule import ROOT_PID, RunningCapsule

log = logging.getLogger("liveshift.porter")

POLL_S = 0.005

Claim = Callable[[messages.Claim], Awaitable[messages.Ruled]]
"""A function that sends a claim; raises LiveshiftError if the orchestrator does not answer."""


class MigrationRegistry:
    """Holds departures and arrivals by the name of their migration."""

    def __init__(
        self, capsule_table: CapsuleTable, criu: Criu | None, claim: Claim, gpus: GpuWatch
    ) -> None:
        self._capsule_table = capsule_table
        self._tasks = Tasks()
        self._busy: set[str] = set()  # migrations with work under way on this host
        self.criu = criu
        self.claim = claim
        self.reservations = GpuReservations(capsule_table.host, gpus, self.gpus_taken)
        self.devices = Devices(gpus, capsule_table.cluster)
        self.facts = host_facts.facts(criu)
        cluster, own = capsule_table.cluster, capsule_table.cluster.host(capsule_table.host)
        self.receiver = Receiver(
            str(own.data),
            str(own.pages),
            cluster.paths.keys,
            capsule_table.host,
            [host.address for host in cluster.hosts],
            clear=cluster.wire.seal == SealChoice.OFF,
        )
        self.gpus_swapped: dict[str, str] = {}  # uuid → reason in words, during GPU swaps
        self.departures: dict[str, OutgoingMigration] = {}
        self.arrivals: dict[str, IncomingMigration] = {}

    def keep_kernel_data(self) -> None:
        """Store CRIU's probe of the kernel, so that no dump or restore repeats it; takes 0.2 s."""
        if self.criu is not None:
            kernel_data.keep(self.criu, self._capsule_table.cluster.paths.run / "criu")

    def holds(self, resident: RunningCapsule) -> bool:
        """Whether a migration has promised to hold it; that migration then handles its end."""
        return any(d.resident is resident and d.promised for d in self.departures.values())

    def gpus_taken(self) -> dict[str, str]:
        """GPUs that no other capsule gets: promised to one that arrives, or left by one that may
        come back. Maps each uuid to the reason, in words."""
        taken = {**self.reservations.chosen, **self.gpus_swapped}
        for migration, departure in self.departures.items():
            words = f"is kept for {departure.resident.spec.name}, which is leaving ({migration})"
            taken |= dict.fromkeys(departure.gpus, words)
        for migration, arrival in self.arrivals.items():
            words = f"is promised to {arrival.resident.spec.name} ({migration})"
            taken |= dict.fromkeys(arrival.gpus_promised, words)
        return taken

    def free(self, capsule: str) -> RunningCapsule:
        """Like :meth:`running`; also raises Refused if another migration still holds it."""
        resident = self.running(capsule)
        held = next((d for d in self.departures.values() if d.resident is resident), None)
        if held is not None:
            raise Refused(f"{capsule} is held by {held.migration} still")
        return resident

    def running(self, capsule: str) -> RunningCapsule:
        """The capsule; raises NotFound if it is not here, Refused if it has ended."""
        resident = self._capsule_table.resident(capsule)
        if resident.code is not None:
            raise Refused(f"{capsule} has ended with code {resident.code}")
        return resident

    async def survey_gpus(self, resident: RunningCapsule) -> messages.GpuSurvey | None:
        """What its processes use of GPUs, and what could not be moved off them."""
        found = await self.surveyed(resident)
        return await asyncio.to_thread(self.reservations.survey, resident, found)

    async def surveyed(self, resident: RunningCapsule) -> Survey:
        """A survey of the capsule's processes; raises Refused if it is just ending."""
        name, placement = resident.spec.name, self._capsule_table.factory.placement
        try:
            return await self._capsule_table.blocking(
                name, lambda: survey(resident.sandbox, ROOT_PID, placement)
            )
        except ProcessLookupError as gone:
            raise Refused(f"{name} is just ending") from gone

    def sender(self, ask: messages.StartPrecopy | messages.Forward) -> Sender:
        """A sender to the host that will receive the capsule."""
        cluster = self._capsule_table.cluster
        return Sender(
            ask.migration,
            ask.endpoint,
            cluster.paths.keys,
            self._capsule_table.host,
            ask.destination,
            patience=2 * cluster.timeouts.suspicion,
        )

    def lanes(self, beside: Sender) -> Lanes:
        """Lanes for pages, to the host of ``beside``. They come from this host's own address: the
        destination accepts no other."""
        cluster, wire = self._capsule_table.cluster, self._capsule_table.cluster.wire
        own = cluster.host(self._capsule_table.host).address
        endpoint = f"tcp://{own}:0;{cluster.host(beside.to.name).pages}"
        clear = wire.seal == SealChoice.OFF
        return Lanes(beside, endpoint, wire.streams, wire.compress, clear=clear)

    @contextlib.contextmanager
    def working(self, migration: str) -> Iterator[None]:
        """Mark the migration as busy on this host."""
        self._busy.add(migration)
        try:
            yield
        finally:
            self._busy.discard(migration)

    async def idle(self, migration: str) -> None:
        """Return once no work for that migration is under way here."""
        while migration in self._busy:
            await asyncio.sleep(POLL_S)

    # ---- after a restart ----

    async def take_up(self) -> None:
        """Go on with the capsules and migrations of an earlier agent; it blocks only briefly."""
        factory = self._capsule_table.factory
        images = self._capsule_table.cluster.paths.run / "images"
        names = sorted(path.name for path in images.iterdir())
        for name in names:
            arrival = await asyncio.to_thread(
                IncomingMigration.take_up, name, factory, self.devices
            )
            if arrival is None or await asyncio.to_thread(_runs_already, arrival):
                continue
            self.arrivals[name] = arrival
            log.warning("%s: its image is here, complete; asking what becomes of it", name)
        keep = {a.resident.sandbox.plan.directory.name for a in self.arrivals.values()}
        await self._capsule_table.take_up(keep)
        for name in names:
            await self._take_up_departure(name)
            if name not in self.departures and name not in self.arrivals:
                shutil.rmtree(images / name, ignore_errors=True)

    async def _take_up_departure(self, name: str) -> None:
        """Thaw a tree that was being frozen; keep one frozen if the earlier agent had promised."""
        try:
            raw = (self._capsule_table.factory.images(name) / leaving.NOTE).read_bytes()
            note = msgspec.msgpack.decode(raw, type=leaving.OutgoingNote)
            resident = self._capsule_table.resident(note.capsule)
        except (FileNotFoundError, msgspec.DecodeError, NotFound):
            return
        here = await asyncio.to_thread(
            lambda: OutgoingMigration.take_up(
                name,
                resident,
                self._capsule_table.factory,
                lambda: self.devices.left(name, resident),
            )
        )
        here.gpus = note.gpus
        if here.promised:
            log.warning("%s: %s is held frozen; asking what becomes of it", name, note.capsule)
            self.departures[name] = here
        else:
            log.warning("%s: %s was being frozen; it goes on here", name, note.capsule)
            try:
                await asyncio.to_thread(here.thaw)
            except LiveshiftError as error:  # the next claim tries it again
                log.error("%s: %s", name, error)
                self.departures[name] = here

    # ---- what becomes of it ----

    async def keep_asking(self) -> None:
        """Once per heartbeat, send a claim for each copy that this host holds."""
        while True:
            await asyncio.sleep(self._capsule_table.cluster.timeouts.heartbeat)
            for name in {*self.departures, *self.arrivals} - self._busy:
                try:
                    await self.ask_about(name)
                except LiveshiftError as error:
                    log.warning("%s is not settled yet: %s", name, error)
                except Exception:
                    log.exception("%s is not settled yet", name)

    async def settle(self, ask: messages.Settle) -> messages.Settled:
        """Claim now, on the orchestrator's order, after the work under way for that migration."""
        departure = self.departures.get(ask.migration)
        if departure is not None:
            departure.abandon()
        await self.idle(ask.migration)
        state = await self.ask_about(ask.migration)
        here = self._capsule_table.capsules.get(ask.capsule)
        if state == "nothing" and here is not None and ask.migration not in self.departures:
            state = "runs" if here.code is None and here.sandbox.alive() else "ended"
        return messages.Settled(state)

    async def ask_about(self, migration: str) -> str:
        """Send a claim and follow the ruling, unless work is under way; return the new state."""
        if migration in self._busy:
            return "held"
        if (departure := self.departures.get(migration)) is not None:
            with self.working(migration):
                return await self._settle_departure(departure)
        if (arrival := self.arrivals.get(migration)) is not None:
            with self.working(migration):
                return await self._settle_arrival(arrival)
        return "nothing"

    async def _settle_departure(self, departure: OutgoingMigration) -> str:
        name, resident = departure.resident.spec.name, departure.resident
        claim = messages.Claim(
            departure.migration, name, Side.LEAVING.value, resident.epoch, ready=True
        )
        ruled = await self.claim(claim)
        ruling = Ruling(ruled.ruling)
        if ruling is not Ruling.WAIT and ruled.epoch < resident.epoch:
            raise LiveshiftError(
                f"the ruling on {name} is of epoch {ruled.epoch}, and it has {resident.epoch}"
            )
        alive = resident.sandbox.alive()  # if not, it was killed while it was held
        if ruling is Ruling.WAIT and not alive:
            return "nothing"
        if ruling is Ruling.RUN:
            resident.epoch = ruled.epoch
            await self._capsule_table.blocking(name, departure.thaw)
            self.departures.pop(departure.migration, None)
            if not alive:
                self._capsule_table.ended(resident)
                return "ended"
            try:
                resident.note()
            except OSError as error:  # the capsule runs, and that is the answer
                log.error("%s: cannot note its epoch: %s", name, error)
            return "runs"
        if ruling is Ruling.END and not departure.promised:  # the capsule ended by itself
            await self._capsule_table.blocking(name, departure.thaw)
            self.departures.pop(departure.migration, None)
            return "ended"
        if ruling is Ruling.END:
            if self._capsule_table.capsules.get(name) is resident:
                self._capsule_table.capsules.pop(name)
            await self._capsule_table.blocking(name, departure.finish)
            self.departures.pop(departure.migration, None)
            if departure.gpus:  # so that the next beat reports them free
                self._tasks.spawn(asyncio.to_thread(self.devices.gpus.look))
            return "ended"
        return "held"

    async def _settle_arrival(self, arrival: IncomingMigration) -> str:
        name = arrival.resident.spec.name
        claim = messages.Claim(
            arrival.migration, name, Side.COMING.value, arrival.resident.epoch, ready=False
        )
        if Ruling((await self.claim(claim)).ruling) is not Ruling.END:
            return "held"
        self.receiver.forget(arrival.migration)
        async with self._capsule_table.network:
            await self._capsule_table.blocking(name, arrival.discard)
        self.arrivals.pop(arrival.migration, None)
        return "ended"


def _runs_already(arrival: IncomingMigration) -> bool:
    """Whether an earlier agent let the arrival run; if not, drop what there is of its tree."""
    if arrival.resident.noted():
        return arrival.finish_letting_run()
    arrival.drop_tree()
    return False
