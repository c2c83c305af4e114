# SPDX-License-Identifier: Apache-2.0
"""The migrations that a host takes part in, by name, and what they share: CRIU, the GPUs, the wire.
Sources of snapshots share it too, and their sessions are kept here.

The orchestrator asks for the steps of a migration one by one (source_handlers.py,
destination_handlers.py). rulings.py brings what this host holds to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator

from ...criu_glue.criu import kernel_data
from ...criu_glue.criu.tool import Criu
from ...criu_glue.survey.found import Survey
from ...criu_glue.survey.survey import survey
from ...errors import NotFound, Refused
from .. import messages
from ..config.choices import SealChoice
from ..wire import Lanes, Receiver, Sender
from .arrival.incoming_migration import IncomingMigration
from .departure.outgoing_migration import OutgoingMigration
from .departure.outgoing_note import read_note
from .departure.snapshot_sessions import SnapshotSessions
from .gpu.devices import Devices
from .gpu.reservations import GpuReservations
from .gpu.watch import GpuWatch
from .holding.held_images import HELD
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.running_capsule import ROOT_PID, RunningCapsule

log = logging.getLogger("liveshift.registry")

POLL_S = 0.005


class MigrationRegistry:
    """Holds outgoing and incoming migrations by name."""

    def __init__(self, capsule_table: CapsuleTable, criu: Criu | None, gpus: GpuWatch) -> None:
        self._capsule_table = capsule_table
        self._busy: set[str] = set()  # migrations with work under way on this host
        self.criu = criu
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
        self.outgoing: dict[str, OutgoingMigration] = {}
        self.incoming: dict[str, IncomingMigration] = {}
        self.snapshots = SnapshotSessions()
        self._undecided: set[str] = set()  # names in outgoing that wait for let_go_on

    def dumper(self) -> Criu:
        """CRIU; raises Refused if this host has none."""
        if self.criu is None:
            host = self._capsule_table.host
            raise Refused(
                f"{host} has no CRIU, or one that is too old",
                hint=f"run `liveshift doctor` on {host}",
            )
        return self.criu

    def keep_kernel_data(self) -> None:
        """Store CRIU's probe of the kernel, so that no dump or restore repeats it; takes 0.2 s."""
        if self.criu is not None:
            kernel_data.keep(self.criu, self._capsule_table.cluster.paths.run / "criu")

    def holds(self, resident: RunningCapsule) -> bool:
        """Whether a migration has promised to hold it; that migration then handles its end."""
        return any(o.resident is resident and o.promised for o in self.outgoing.values())

    def gates_close(self, job: str) -> None:
        """The job's ranks come to a boundary, so one of its capsules will soon be frozen."""
        for outgoing in self._outgoing_of(job):
            outgoing.gates_close()

    def gates_open(self, job: str) -> None:
        """The job's ranks train on."""
        for outgoing in self._outgoing_of(job):
            outgoing.gates_open()

    def _outgoing_of(self, job: str) -> list[OutgoingMigration]:
        return [o for o in self.outgoing.values() if o.resident.spec.job == job]

    def gpus_taken(self) -> dict[str, str]:
        """GPUs that no other capsule gets: promised to one that arrives, or left by one that may
        come back. Maps each uuid to the reason, in words."""
        taken = {
            **self.reservations.chosen,
            **self.gpus_swapped,
            **self.snapshots.gpus_left(),
        }
        for migration, outgoing in self.outgoing.items():
            words = f"is kept for {outgoing.resident.spec.name}, which is leaving ({migration})"
            taken |= dict.fromkeys(outgoing.gpus, words)
        for migration, incoming in self.incoming.items():
            words = f"is promised to {incoming.resident.spec.name} ({migration})"
            taken |= dict.fromkeys(incoming.gpus_promised, words)
        return taken

    def free(self, capsule: str) -> RunningCapsule:
        """Like :meth:`running`; also raises Refused if another migration still holds it."""
        resident = self.running(capsule)
        held = next((o for o in self.outgoing.values() if o.resident is resident), None)
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
        await self.until_on_gpus(resident.spec.name)
        return await asyncio.to_thread(self.reservations.survey, resident, found)

    async def until_on_gpus(self, capsule: str) -> None:
        """Return once no snapshot has the capsule's device state off its GPUs, or after half of
        ``timeouts.prepare``: then a survey says what it finds."""
        until = time.monotonic() + self._capsule_table.cluster.timeouts.prepare / 2
        while self.snapshots.off_gpus(capsule) and time.monotonic() < until:
            await asyncio.sleep(POLL_S)

    async def surveyed(self, resident: RunningCapsule) -> Survey:
        """A survey of the capsule's processes; raises Refused if it is just ending. What a
        snapshot's CRIU does to them meanwhile is no obstacle: its sockets, for example."""
        name = resident.spec.name
        until = time.monotonic() + self._capsule_table.cluster.timeouts.prepare / 2
        while True:
            before = self.snapshots.dumps(name)
            found = await self._survey(resident)
            dumped = before or self.snapshots.dumps(name)
            if not (found.problems and dumped) or time.monotonic() > until:
                return found
            while self.snapshots.dumps(name) and time.monotonic() < until:
                await asyncio.sleep(POLL_S)

    async def _survey(self, resident: RunningCapsule) -> Survey:
        name, placement = resident.spec.name, self._capsule_table.factory.placement
        try:
            return await self._capsule_table.blocking(
                name, lambda: survey(resident.sandbox, ROOT_PID, placement)
            )
        except ProcessLookupError as gone:
            raise Refused(f"{name} is just ending") from gone

    def open_sender(self, migration: str, destination: str, endpoint: str) -> Sender:
        """A sender to the host that will receive the image of that name."""
        cluster = self._capsule_table.cluster
        return Sender(
            migration,
            endpoint,
            cluster.paths.keys,
            self._capsule_table.host,
            destination,
            patience=2 * cluster.timeouts.suspicion,
        )

    def open_lanes(self, beside: Sender) -> Lanes:
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

    def is_busy(self, migration: str) -> bool:
        return migration in self._busy

    def is_undecided(self, migration: str) -> bool:
        """Whether :meth:`let_go_on` is still to come for it. Then no claim is sent."""
        return migration in self._undecided

    def not_busy(self) -> set[str]:
        """The migrations without work under way on this host, for which it may send claims."""
        return {*self.outgoing, *self.incoming} - self._busy - self._undecided

    async def until_idle(self, migration: str) -> None:
        """Return once no work for that migration is under way here."""
        while migration in self._busy:
            await asyncio.sleep(POLL_S)

    # ---- after a restart ----

    async def recover_migrations(self) -> None:
        """Go on with the capsules and migrations of an earlier agent; it blocks only briefly."""
        factory = self._capsule_table.factory
        images = self._capsule_table.cluster.paths.run / "images"
        # Images that this host holds for others are no migrations.
        names = sorted(path.name for path in images.iterdir() if path.name != HELD)
        for name in names:
            incoming = await asyncio.to_thread(
                IncomingMigration.recover, name, factory, self.devices
            )
            if incoming is None or await asyncio.to_thread(incoming.resume_recovered):
                continue
            self.incoming[name] = incoming
            log.warning("%s: its complete image is here; sending claims for it", name)
        keep = {i.resident.sandbox.plan.directory.name for i in self.incoming.values()}
        await self._capsule_table.recover_capsules(keep)
        for name in names:
            await self._recover_outgoing(name)
            if name not in self.outgoing and name not in self.incoming:
                shutil.rmtree(images / name, ignore_errors=True)

    async def _recover_outgoing(self, name: str) -> None:
        """Keep a tree frozen that an earlier agent was freezing: until a ruling if that agent had
        promised, else until :meth:`let_go_on`."""
        factory = self._capsule_table.factory
        if (note := read_note(factory.images(name))) is None:
            return
        try:
            resident = self._capsule_table.resident(note.capsule)
        except NotFound:
            return
        if note.epoch and note.epoch != resident.epoch:
            log.warning("%s: %s has left by it, and come back since", name, note.capsule)
            return
        outgoing = await asyncio.to_thread(
            OutgoingMigration.recover,
            name,
            resident,
            factory,
            note.gpus,
            lambda: self.devices.left(name, resident),
        )
        self.outgoing[name] = outgoing
        if outgoing.promised:
            log.warning("%s: %s is held frozen; sending claims for it", name, note.capsule)
        else:
            log.warning("%s: %s was being frozen", name, note.capsule)
            self._undecided.add(name)

    async def let_go_on(self) -> None:
        """Thaw what an earlier agent was freezing when it died, and had not promised to hold.

        The caller registers first. The orchestrator may have taken the job back meanwhile, or may
        have suspended it: then the answer has ended this copy, which must not run beside its
        successor. If the orchestrator does not answer, the copy goes on.
        """
        undecided, self._undecided = sorted(self._undecided), set()
        for name in undecided:
            outgoing = self.outgoing.get(name)
            if outgoing is None or outgoing.resident.leaving or self.is_busy(name):
                continue
            capsule = outgoing.resident.spec.name
            log.warning("%s: %s goes on here", name, capsule)
            with self.working(name):
                try:
                    await self._capsule_table.blocking(capsule, outgoing.thaw)
                except Exception:  # the agent must serve, and the next claim tries again
                    log.exception("%s: %s does not go on yet", name, capsule)
                else:
                    self.outgoing.pop(name, None)
