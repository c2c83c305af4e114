# SPDX-License-Identifier: Apache-2.0
"""A host's part in migrations: departures and arrivals, as the orchestrator asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ..criu_glue.survey import survey
from ..criu_glue.tool import Criu
from ..errors import Refused
from . import host_facts, messages, preflight
from .arrival import Arrival
from .departure import Departure
from .house import House
from .resident import ROOT_PID, interposer_pages
from .stopwatch import Stopwatch
from .tasks import Tasks
from .wire import Receiver, Sender

log = logging.getLogger("liveshift.porter")

RESUME_POLL_S = 0.005


class Porter:
    """Keeps departures and arrivals by the name of their migration."""

    def __init__(self, house: House, criu: Criu | None) -> None:
        self._house = house
        self._criu = criu
        self._own = house.cluster.host(house.host)
        self._tasks = Tasks()
        self.facts = host_facts.facts(criu)
        self.receiver = Receiver(str(self._own.data), house.cluster.paths.keys, house.host)
        self.departures: dict[str, Departure] = {}
        self.arrivals: dict[str, Arrival] = {}

    def memory_offered(self) -> int:
        """Bytes that an incoming capsule may take."""
        return host_facts.memory_offered(self._own.memory)

    async def discard_left_over(self, books: messages.Books) -> None:
        """A Discard may not have reached us; what the journal says is ours is never dropped."""
        host = self._house.host
        ours = {a for b in books.books for a, (owner, _) in b.where.items() if owner == host}
        for name, arrival in list(self.arrivals.items()):
            here = arrival.resident
            if name not in books.arriving and here.overlay.address(here.spec.index) not in ours:
                await self.discard(messages.Discard(name, here.spec.name))

    # ---- the source's side ----

    async def inspect(self, ask: messages.Inspect) -> messages.Inspected:
        resident = self._house.resident(ask.capsule)
        if resident.code is not None:
            raise Refused(f"{ask.capsule} has ended with code {resident.code}")
        self._dumper()  # said now, before a plan promises what the move could not do
        try:
            found = await self._house.blocking(
                ask.capsule, lambda: survey(resident.room, ROOT_PID, self._house.housing.placement)
            )
        except ProcessLookupError as gone:
            raise Refused(f"{ask.capsule} is just ending") from gone
        carried = await asyncio.to_thread(
            _size_of, map(Path, self._house.housing.placement.carried)
        )
        return messages.Inspected(found, self.facts, carried)

    def _dumper(self) -> Criu:
        if self._criu is None:
            raise Refused(
                f"CRIU is missing or too old on {self._house.host}", hint="`liveshift doctor`"
            )
        return self._criu

    async def precopy(self, ask: messages.Precopy) -> messages.Moved:
        resident, criu, keys = (
            self._house.resident(ask.capsule),
            self._dumper(),
            self._house.cluster.paths.keys,
        )
        sender = Sender(ask.migration, ask.endpoint, keys, self._house.host, ask.destination)
        departure = Departure(ask.migration, resident, self._house.housing, criu, sender)
        self.departures[ask.migration] = departure
        return await self._house.blocking(ask.capsule, departure.precopy)

    async def freeze(self, ask: messages.Freeze) -> messages.Frozen:
        departure = self.departures[ask.migration]
        return await self._house.blocking(ask.capsule, lambda: departure.freeze(ask.deadline))

    async def thaw(self, ask: messages.Thaw) -> None:
        departure = self.departures.get(ask.migration)
        if departure is not None:
            departure.resident.epoch = ask.epoch
            await self._house.blocking(ask.capsule, departure.thaw)
            self.departures.pop(ask.migration, None)  # now: a failed one is tried again when asked
            try:
                departure.resident.note()
            except OSError as error:  # it runs, and that is the answer
                log.error("%s: cannot note its epoch: %s", ask.capsule, error)

    async def finish(self, ask: messages.Finish) -> None:
        departure = self.departures.get(ask.migration)
        if departure is not None:
            self._house.capsules.pop(ask.capsule, None)
            await self._house.blocking(ask.capsule, departure.finish)
            self.departures.pop(ask.migration, None)

    # ---- the destination's side ----

    async def reserve(self, ask: messages.Reserve) -> messages.Reserved:
        offered = self.memory_offered()
        rows = await asyncio.to_thread(
            preflight.check, ask.survey, ask.facts, self.facts, self._criu, offered
        )
        if ask.dry_run:
            return messages.Reserved(rows, "")
        spec = ask.spec
        async with self._house.network:
            resident = await self._house.blocking(
                spec.name,
                lambda: self._house.housing.house_empty(spec, ask.book, ask.epoch, ask.survey.pids),
            )
        arrival = Arrival(ask.migration, ask.source, resident, self._house.housing)
        self.arrivals[ask.migration] = arrival
        self.receiver.expect(ask.migration, ask.source, arrival.inbox)
        await asyncio.to_thread(preflight.warm, ask.survey.needed)
        return messages.Reserved(rows, f"tcp://{self._own.data}")

    async def restore(self, ask: messages.Restore) -> messages.Moved:
        arrival, criu = self.arrivals[ask.migration], self._criu
        assert criu is not None  # the preflight has seen it
        name = arrival.resident.spec.name
        moved = await self._house.blocking(
            name, lambda: arrival.restore(criu, ask.frozen, ask.deadline)
        )
        arrival.resident.epoch = ask.epoch
        arrival.resident.note()
        self._house.admit(arrival.resident)
        self.receiver.forget(ask.migration)
        del self.arrivals[ask.migration]
        self._tasks.spawn(asyncio.to_thread(arrival.free_images))
        return moved

    async def resume(self, ask: messages.Resume) -> messages.Moved:
        resident = self._house.resident(ask.capsule)
        watch_ = Stopwatch()
        with watch_.phase("resume") as lap:
            before = {p.pid: p.finished for p in interposer_pages(resident.room)}
            until = time.monotonic() + ask.deadline
            lap.detail = "no collectives in this job"
            while before:
                seen = {p.pid: p.finished for p in interposer_pages(resident.room)}
                if any(seen.get(pid, 0) > count for pid, count in before.items()):
                    lap.detail = "until the first collective"
                    break
                if time.monotonic() > until or resident.code is not None:
                    lap.detail = f"no collective within {ask.deadline:g} s"
                    break
                await asyncio.sleep(RESUME_POLL_S)
        return messages.Moved(0, watch_.phases)

    async def discard(self, ask: messages.Discard) -> None:
        self.receiver.forget(ask.migration)
        arrival = self.arrivals.pop(ask.migration, None)
        if arrival is not None:
            async with self._house.network:
                await self._house.blocking(ask.capsule, arrival.discard)
            book = self._house.books.get(arrival.resident.spec.job)
            if book is not None:  # the address is where it was before the room was built
                self._house.books.pop(book.job)
                await self._house.locate(messages.Locate(book))

    async def progress(self, ask: messages.Progress) -> messages.Moved:
        return messages.Moved(self.receiver.received(ask.migration), [])


def _size_of(tops: Iterable[Path]) -> int:
    """Bytes of the files below some directories."""
    total = 0
    for top in tops:
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total
