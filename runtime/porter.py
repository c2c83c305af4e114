# SPDX-License-Identifier: Apache-2.0
"""A host's part in migrations: departures and arrivals, as the orchestrator asks for them.

What is held here for a migration is settled by asking (:meth:`Porter.settle`): on the
orchestrator's word, and every heartbeat without it, so that no lost word and no restart of either
daemon leaves a copy behind. The answer is a ruling of the journal (ownership.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ..criu_glue import kernel_data
from ..criu_glue.memory.donors import Donors
from ..criu_glue.memory.tracker import MemoryTracker
from ..criu_glue.survey import Survey, survey
from ..criu_glue.tool import Criu
from ..errors import LiveshiftError, NotFound, Refused, StepFailed
from . import departure as leaving
from . import forecast, host_facts, link_rates, messages, offering, preflight
from .arrival import Arrival
from .departure import Departure
from .devices import Devices
from .faultpoints import reached
from .gpu_preflight import GpuPlan
from .gpu_reservations import GpuReservations
from .gpu_watch import GpuWatch
from .house import House
from .ownership import Ruling, Side
from .precopy import Precopy, full_dump_because
from .progress import Reporter
from .resident import ROOT_PID, Resident, finished_by_pid
from .stopwatch import Stopwatch
from .tasks import Tasks
from .wire import LANES, Lanes, Receiver, Sender

log = logging.getLogger("liveshift.porter")

POLL_S = 0.005
FREE_AFTER_S = 1.0

Claim = Callable[[messages.Claim], Awaitable[messages.Ruled]]
"""Asks the orchestrator; raises LiveshiftError when it does not answer."""


class Porter:
    """Keeps departures and arrivals by the name of their migration."""

    def __init__(self, house: House, criu: Criu | None, claim: Claim, gpus: GpuWatch) -> None:
        self._house = house
        self._criu = criu
        self._claim = claim
        # By capsule, when it was inspected last; None: it has nothing to do with a GPU.
        self._gpus_used: dict[str, list[str] | None] = {}
        self._reservations = GpuReservations(gpus, self.gpus_taken)
        self._own = house.cluster.host(house.host)
        self._tasks = Tasks()
        self._busy: set[str] = set()  # migrations that are being worked on here
        self.devices = Devices(gpus, house.cluster)
        self.facts = host_facts.facts(criu)
        self.receiver = Receiver(str(self._own.data), house.cluster.paths.keys, house.host)
        self.gpus_swapped: dict[str, str] = {}  # by uuid, while capsules change GPUs; in words
        self.departures: dict[str, Departure] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.tell: Callable[[messages.Progressed], None] = lambda _word: None
        """Carries a word about progress to the orchestrator, or loses it; from any thread."""

    def keep_kernel_data(self) -> None:
        """So that no dump and no restore has to probe the kernel; takes 0.2 s."""
        if self._criu is not None:
            kernel_data.keep(self._criu, self._house.cluster.paths.run / "criu")

    def memory_offered(self) -> int:
        """Bytes that an incoming capsule may take."""
        return host_facts.memory_offered(self._own.memory)

    def holds(self, resident: Resident) -> bool:
        """Whether a migration has promised to hold it: its end is that migration's matter then."""
        return any(d.resident is resident and d.promised for d in self.departures.values())

    def gpus_taken(self) -> dict[str, str]:
        """GPUs that no other capsule gets: promised to one that arrives, or left by one that may
        have to come back; by uuid, and what of it, in words."""
        taken = {**self._reservations.chosen, **self.gpus_swapped}
        for migration, departure in self.departures.items():
            words = f"is kept for {departure.resident.spec.name}, which is leaving ({migration})"
            taken |= dict.fromkeys(departure.gpus, words)
        for migration, arrival in self.arrivals.items():
            words = f"is promised to {arrival.resident.spec.name} ({migration})"
            taken |= dict.fromkeys(arrival.gpus_promised, words)
        return taken

    async def take_up(self) -> None:
        """Go on with what an earlier agent has left, capsules and migrations; blocks little."""
        housing = self._house.housing
        images = self._house.cluster.paths.run / "images"
        names = sorted(path.name for path in images.iterdir())
        for name in names:
            arrival = await asyncio.to_thread(Arrival.take_up, name, housing, self.devices)
            if arrival is None or await asyncio.to_thread(_runs_already, arrival):
                continue
            self.arrivals[name] = arrival
            log.warning("%s: its image is here, complete; asking what becomes of it", name)
        keep = {a.resident.room.plan.directory.name for a in self.arrivals.values()}
        await self._house.take_up(keep)
        for name in names:
            await self._take_up_departure(name)
            if name not in self.departures and name not in self.arrivals:
                shutil.rmtree(images / name, ignore_errors=True)

    async def _take_up_departure(self, name: str) -> None:
        """A tree that was being frozen goes on; one whose agent has promised waits."""
        try:
            raw = (self._house.housing.images(name) / leaving.NOTE).read_bytes()
            note = msgspec.msgpack.decode(raw, type=leaving.DepartureNote)
            resident = self._house.resident(note.capsule)
        except (FileNotFoundError, msgspec.DecodeError, NotFound):
            return
        here = await asyncio.to_thread(
            lambda: Departure.take_up(
                name, resident, self._house.housing, lambda: self.devices.left(name, resident)
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
            except LiveshiftError as error:  # asked about it again, it is tried again
                log.error("%s: %s", name, error)
                self.departures[name] = here

    async def keep_asking(self) -> None:
        """Once per heartbeat: what becomes of what is held here?"""
        while True:
            await asyncio.sleep(self._house.cluster.timeouts.heartbeat)
            for name in {*self.departures, *self.arrivals} - self._busy:
                try:
                    await self._settle(name)
                except LiveshiftError as error:
                    log.warning("%s is not settled yet: %s", name, error)
                except Exception:
                    log.exception("%s is not settled yet", name)

    # ---- the source's side ----

    async def inspect(self, ask: messages.Inspect) -> messages.Inspected:
        resident = self.free(ask.capsule)
        criu = self._dumper()  # said now, before a plan promises what the move could not do
        await asyncio.to_thread(preflight.warm_tools, criu)
        found = await self._survey(resident)
        plan = resident.room.plan
        tops = [plan.tmp, *map(Path, self._house.housing.placement.carried)]
        carried = await asyncio.to_thread(_size_of, tops) + plan.log.stat().st_size
        gpu = await asyncio.to_thread(self._reservations.survey, resident, found)
        self._gpus_used[ask.capsule] = list(gpu.used) if gpu else None
        settings = self._house.cluster.precopy
        size, writing, full = await asyncio.to_thread(forecast.look, resident, settings, ask.watch)
        return messages.Inspected(found, self.facts, carried, gpu, size, writing, full)

    async def survey_gpus(self, resident: Resident) -> messages.GpuSurvey | None:
        """What its processes hold of GPUs, and what of it could not be taken off them."""
        found = await self._survey(resident)
        return await asyncio.to_thread(self._reservations.survey, resident, found)

    async def _survey(self, resident: Resident) -> Survey:
        name, placement = resident.spec.name, self._house.housing.placement
        try:
            return await self._house.blocking(
                name, lambda: survey(resident.room, ROOT_PID, placement)
            )
        except ProcessLookupError as gone:
            raise Refused(f"{name} is just ending") from gone

    def free(self, capsule: str) -> Resident:
        """Raises Refused for a capsule that another migration has still."""
        resident = self._running(capsule)
        held = next((d for d in self.departures.values() if d.resident is resident), None)
        if held is not None:
            raise Refused(f"{capsule} is held by {held.migration} still")
        return resident

    def _running(self, capsule: str) -> Resident:
        resident = self._house.resident(capsule)
        if resident.code is not None:
            raise Refused(f"{capsule} has ended with code {resident.code}")
        return resident

    def _dumper(self) -> Criu:
        if self._criu is None:
            raise Refused(
                f"CRIU is missing or too old on {self._house.host}", hint="`liveshift doctor`"
            )
        return self._criu

    async def precopy(self, ask: messages.Precopy) -> messages.Moved:
        self._dumper()
        resident = self.free(ask.capsule)
        sender = self._sender(ask)
        devices = None
        if self._gpus_used.get(ask.capsule) is not None:  # a GPU that hangs is no CPU job's matter
            devices = await asyncio.to_thread(
                self.devices.tree, ask.migration, resident, full=ask.verify, plain=ask.plain
            )
        departure = Departure(ask.migration, resident, self._house.housing, sender, devices)
        departure.gpus = self._gpus_used.get(ask.capsule) or []
        self.departures[ask.migration] = departure
        until = time.monotonic() + ask.deadline
        with self._working(ask.migration):
            if devices is not None:
                await asyncio.to_thread(devices.warm, departure.gpus)
            cluster, why = self._house.cluster, ask.full_dump
            why = why or await asyncio.to_thread(full_dump_because, resident, cluster.precopy)
            departure.full_dump = why
            if not why:
                reporter = Reporter(self.tell, ask.migration)
                lanes = self._lanes(sender)
                departure.memory = Precopy(
                    resident, lanes, cluster.precopy, reporter, sender.wants, ask.offer
                )
                departure.memory.rate = await asyncio.to_thread(lanes.measure)
                link_rates.keep(cluster.paths.run, ask.destination, departure.memory.rate)
            return await self._house.blocking(ask.capsule, lambda: departure.precopy(until))

    def _sender(self, ask: messages.Precopy | messages.Forward) -> Sender:
        cluster = self._house.cluster
        return Sender(
            ask.migration, ask.endpoint, cluster.paths.keys, self._house.host, ask.destination,
            patience=2 * cluster.timeouts.suspicion,
        )  # fmt: skip

    def _lanes(self, beside: Sender) -> Lanes:
        wire = self._house.cluster.wire
        return Lanes(beside.to, wire.streams, wire.compress)

    def gates_close(self, job: str) -> None:
        """Its ranks come to a boundary, so a freeze is near."""
        for departure in self.departures.values():
            if departure.resident.spec.job == job and departure.memory is not None:
                departure.memory.rest()

    async def freeze(self, ask: messages.Freeze) -> messages.Frozen:
        criu, departure = self._dumper(), self.departures.get(ask.migration)
        self._running(ask.capsule)
        if departure is None:
            raise NotFound(f"{self._house.host} knows no migration {ask.migration}")
        with self._working(ask.migration):
            return await self._house.blocking(
                ask.capsule, lambda: departure.freeze(criu, ask.deadline)
            )

    # ---- the destination's side ----

    async def reserve(self, ask: messages.Reserve) -> messages.Reserved:
        async with self._reservations.making(ask) as gpus:
            return await self._reserve(ask, gpus)

    async def _reserve(self, ask: messages.Reserve, gpus: GpuPlan) -> messages.Reserved:
        offered = self.memory_offered()
        rows = await asyncio.to_thread(
            preflight.check, ask.survey, ask.facts, self.facts, self._criu, offered, gpus
        )
        if ask.dry_run:
            return messages.Reserved(rows, "", gpus.pairs, gpus.plain, MemoryTracker.probe())
        name = ask.spec.name
        self._house.refuse_older(ask)
        if name in self._house.capsules and self._house.capsules[name].code is None:
            raise Refused(f"{name} is on {self._house.host} already")
        for stale in [m for m, a in self.arrivals.items() if a.resident.spec.name == name]:
            if await self._settle(stale) != "ended":
                raise Refused(f"{name} is arriving on {self._house.host} already, by {stale}")
        async with self._house.network:
            resident = await self._house.blocking(
                name, lambda: self._house.housing.house_empty(ask)
            )
        devices = None
        if ask.gpu is not None:
            devices = await asyncio.to_thread(self.devices.tree, ask.migration, resident)
        full_dump, donors = MemoryTracker.probe(), None
        if not full_dump and self._house.cluster.precopy.enabled:
            donors = await self._donors(ask)
        arrival = Arrival(ask, resident, self._house.housing, devices, gpus.pairs, donors)
        arrival.note()
        if self._criu is not None:
            arrival.start_early(self._criu)
        self.arrivals[ask.migration] = arrival
        self.receiver.expect(
            ask.migration, ask.source, arrival.inbox, ask.limit_bytes, arrival.inbox.pages, LANES
        )
        await asyncio.to_thread(preflight.warm, ask.survey.needed)
        if self._criu is not None:
            await asyncio.to_thread(preflight.warm_tools, self._criu)
        plain = gpus.plain
        if devices is not None and not plain:
            plain = await asyncio.to_thread(devices.warm, arrival.gpus_promised)
        here = f"tcp://{self._own.data}"
        offer = await asyncio.to_thread(donors.offer) if donors is not None else b""
        return messages.Reserved(rows, here, gpus.pairs, plain, full_dump, offer)

    async def _donors(self, ask: messages.Reserve) -> Donors | None:
        rooms = offering.siblings(ask.spec, self._house.capsules.values())
        return await asyncio.to_thread(offering.look, rooms)

    async def progress(self, ask: messages.Progress) -> messages.Arrived:
        arrival = self.arrivals.get(ask.migration)
        if arrival is None:
            return messages.Arrived(0, 0, False)
        if ask.close and not arrival.complete:
            await asyncio.to_thread(arrival.inbox.close)
        else:
            await asyncio.to_thread(arrival.inbox.make_room)
        size = arrival.inbox.manifest.image_bytes if arrival.complete else 0
        taken = self.receiver.received(ask.migration)
        return messages.Arrived(taken, size, arrival.complete, *arrival.placed)

    async def restore(self, ask: messages.Restore) -> messages.Moved:
        """Restore, ask, run. Asked again for what runs or is under way, it is as good."""
        name, migration = ask.capsule, ask.migration
        while migration in self._busy:  # an earlier ask for the same; its asker has given up
            await asyncio.sleep(POLL_S)
        here = self._house.capsules.get(name)
        if here is not None and here.epoch == ask.epoch and migration not in self.arrivals:
            return messages.Moved(0, [])
        arrival, criu = self.arrivals.get(migration), self._criu
        if arrival is None or not arrival.room_stands:
            raise NotFound(f"{self._house.host} has no image of {name} (any more)")
        assert criu is not None  # the preflight has seen it
        if ask.epoch <= arrival.failed_epoch:
            raise StepFailed("restore", f"the attempt under epoch {ask.epoch} has failed")
        with self._working(migration):
            try:
                moved = await self._restore(arrival, criu, ask)
            except BaseException:
                arrival.failed_epoch = max(arrival.failed_epoch, ask.epoch)
                raise
            self._house.admit(arrival.resident)
            del self.arrivals[migration]
        await reached("destination.running")
        self.receiver.forget(migration)
        self._tasks.spawn(self._free_images(arrival))
        return moved

    async def _free_images(self, arrival: Arrival) -> None:
        """Not at once: it keeps other threads from mapping memory for some 50 ms per GB, and the
        job stands until its gates were opened here."""
        await asyncio.sleep(FREE_AFTER_S)
        await asyncio.to_thread(arrival.free_images)

    async def _restore(self, arrival: Arrival, criu: Criu, ask: messages.Restore) -> messages.Moved:
        name, watch = ask.capsule, Stopwatch()
        # Beside CRIU: whose the address is by now was committed, whatever comes of this attempt.
        located = asyncio.ensure_future(self._house.locate(arrival.here(ask.epoch)))
        try:
            await self._house.blocking(name, lambda: arrival.bring_up(criu, watch, ask.deadline))
        finally:
            await asyncio.wait({located})
        if (error := located.exception()) is not None:
            await self._house.blocking(name, arrival.drop_tree)
            raise StepFailed("restore", f"its address could not be located here: {error}")
        await reached("destination.claiming")
        with watch.phase("grant", frozen=True):
            await self._may_run(arrival, ask.epoch)
        arrival.resident.finished = finished_by_pid(arrival.resident.room)
        return await self._house.blocking(
            name, lambda: arrival.let_run(watch, ask.epoch, ask.deadline)
        )

    async def forward(self, ask: messages.Forward) -> messages.Frozen:
        """Send an image that could not be restored here on to another spare."""
        while ask.migration in self._busy:
            await asyncio.sleep(POLL_S)
        arrival = self.arrivals.get(ask.migration)
        if arrival is None or not arrival.complete:
            raise NotFound(f"{self._house.host} has no image of {ask.capsule}")
        sender = self._sender(ask)
        lanes = self._lanes(sender)
        try:
            with self._working(ask.migration):
                return await self._house.blocking(
                    ask.capsule, lambda: arrival.forward(sender, lanes)
                )
        finally:
            lanes.close()
            sender.close()

    async def _may_run(self, arrival: Arrival, epoch: int) -> None:
        """Return when the tree may run; raises StepFailed, with it taken down, when it may not.

        Never gives up by itself: that the answer is lost does not mean that there was none.
        """
        name = arrival.resident.spec.name
        claim = messages.Claim(arrival.migration, name, Side.COMING.value, epoch, ready=True)
        while True:
            try:
                ruled = await self._claim(claim)
            except LiveshiftError as error:
                log.warning("%s: may %s run here? %s", arrival.migration, name, error)
                continue
            ruling = Ruling(ruled.ruling)
            if ruling is Ruling.RUN:
                return
            if ruling is Ruling.END or ruled.epoch > epoch:  # another attempt is on its way
                await self._house.blocking(name, arrival.drop_tree)
                raise StepFailed("restore", f"{name} may not run on {self._house.host} any more")
            await asyncio.sleep(self._house.cluster.timeouts.heartbeat)

    async def resume(self, ask: messages.Resume) -> messages.Moved:
        resident = self._house.resident(ask.capsule)
        watch_ = Stopwatch()
        with watch_.phase("resume") as lap:
            before = resident.finished or finished_by_pid(resident.room)
            until = time.monotonic() + ask.deadline
            lap.detail = "no collectives in this job"
            while any(before.values()):
                seen = finished_by_pid(resident.room)
                if any(seen.get(pid, 0) > count for pid, count in before.items()):
                    lap.detail = "until the first collective"
                    break
                if time.monotonic() > until or resident.code is not None:
                    lap.detail = f"no collective within {ask.deadline:g} s"
                    break
                await asyncio.sleep(POLL_S)
        return messages.Moved(0, watch_.phases)

    # ---- both sides: what becomes of it ----

    async def settle(self, ask: messages.Settle) -> messages.Settled:
        """The orchestrator's word to ask now, after what is under way here for that migration."""
        departure = self.departures.get(ask.migration)
        if departure is not None and departure.memory is not None:
            departure.memory.hurry()  # nobody waits for its rounds any more
        while ask.migration in self._busy:
            await asyncio.sleep(POLL_S)
        state = await self._settle(ask.migration)
        here = self._house.capsules.get(ask.capsule)
        if state == "nothing" and here is not None and ask.migration not in self.departures:
            state = "runs" if here.code is None and here.room.alive() else "ended"
        return messages.Settled(state)

    async def _settle(self, migration: str) -> str:
        if migration in self._busy:
            return "held"
        if (departure := self.departures.get(migration)) is not None:
            with self._working(migration):
                return await self._settle_departure(departure)
        if (arrival := self.arrivals.get(migration)) is not None:
            with self._working(migration):
                return await self._settle_arrival(arrival)
        return "nothing"

    async def _settle_departure(self, departure: Departure) -> str:
        name, resident = departure.resident.spec.name, departure.resident
        claim = messages.Claim(
            departure.migration, name, Side.LEAVING.value, resident.epoch, ready=True
        )
        ruled = await self._claim(claim)
        ruling = Ruling(ruled.ruling)
        if ruling is not Ruling.WAIT and ruled.epoch < resident.epoch:
            raise LiveshiftError(f"a ruling under epoch {ruled.epoch}, {name} has {resident.epoch}")
        alive = resident.room.alive()  # else it was killed while it was held
        if ruling is Ruling.WAIT and not alive:
            return "nothing"
        if ruling is Ruling.RUN:
            resident.epoch = ruled.epoch
            await self._house.blocking(name, departure.thaw)
            self.departures.pop(departure.migration, None)
            if not alive:
                self._house.ended(resident)
                return "ended"
            try:
                resident.note()
            except OSError as error:  # it runs, and that is the answer
                log.error("%s: cannot note its epoch: %s", name, error)
            return "runs"
        if ruling is Ruling.END and not departure.promised:  # it has ended by itself meanwhile
            await self._house.blocking(name, departure.thaw)
            self.departures.pop(departure.migration, None)
            return "ended"
        if ruling is Ruling.END:
            if self._house.capsules.get(name) is resident:
                self._house.capsules.pop(name)
            await self._house.blocking(name, departure.finish)
            self.departures.pop(departure.migration, None)
            if departure.gpus:  # the next beat tells that they are free
                self._tasks.spawn(asyncio.to_thread(self.devices.gpus.look))
            return "ended"
        return "held"

    async def _settle_arrival(self, arrival: Arrival) -> str:
        name = arrival.resident.spec.name
        claim = messages.Claim(
            arrival.migration, name, Side.COMING.value, arrival.resident.epoch, ready=False
        )
        if Ruling((await self._claim(claim)).ruling) is not Ruling.END:
            return "held"
        self.receiver.forget(arrival.migration)
        async with self._house.network:
            await self._house.blocking(name, arrival.discard)
        self.arrivals.pop(arrival.migration, None)
        return "ended"

    @contextlib.contextmanager
    def _working(self, migration: str) -> Iterator[None]:
        self._busy.add(migration)
        try:
            yield
        finally:
            self._busy.discard(migration)


def _runs_already(arrival: Arrival) -> bool:
    """Whether an earlier agent has let it run; else nothing of it runs here."""
    if arrival.resident.noted():
        return arrival.finish_letting_run()
    arrival.drop_tree()
    return False


def _size_of(tops: Iterable[Path]) -> int:
    """Bytes of the files below some directories."""
    total = 0
    for top in tops:
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total
