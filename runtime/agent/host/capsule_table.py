# SPDX-License-Identifier: Apache-2.0
"""The capsules of one host, and the requests about them that are not part of a migration.

Blocking work runs in threads, one call at a time for each capsule. Work that makes or removes
network devices runs one call at a time for the host.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from ....criu_glue.capsule import output, sandboxes
from ....criu_glue.network import network
from ....errors import NotFound, Refused
from ... import messages
from ...config.cluster import Cluster
from ...messages import Book
from . import carried_out, ran_here, rank_pages, repeated_output
from .idle_cores import IdleCores
from .running_capsule import CapsuleFactory, RunningCapsule, overlay_of, watch

log = logging.getLogger("liveshift.capsules")
T = TypeVar("T")

OUTPUT_POLL_S = 0.03


class CapsuleTable:
    """All capsules here; ``ended`` is called, in the event loop, when a command has ended.

    ``drop_earlier`` removes what migrations hold of a job from before its last rewind, which is the
    one of the book (Rulings.drop_earlier).
    """

    def __init__(
        self,
        cluster: Cluster,
        host: str,
        ended: Callable[[RunningCapsule], None],
        drop_earlier: Callable[[Book], Awaitable[None]],
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.factory = CapsuleFactory(cluster, host)
        self.capsules: dict[str, RunningCapsule] = {}
        self.books: dict[str, Book] = {}
        self.idle = IdleCores()
        self.network = asyncio.Lock()
        self._forgetting = asyncio.Lock()
        self.ended = ended
        self._drop_earlier = drop_earlier
        self._ended_running: dict[str, tuple[int, set[str]]] = {}  # by job: its rewinds, capsules
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._signals: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def recover_capsules(self, arriving: set[str]) -> None:
        """Go on with the capsules that an earlier agent left here. ``arriving``: the names of the
        directories of capsules that are still arriving."""
        await asyncio.to_thread(self.factory.clear_unfinished, arriving)
        for resident in await asyncio.to_thread(self.factory.returning):
            ran_here.remember(self.factory, resident.spec.name, resident.epoch)
            resident.found_dead = not resident.sandbox.alive()
            self.admit(resident)

    def admit(self, resident: RunningCapsule) -> None:
        """Add the capsule to this host; from now on its end is reported."""
        self.capsules[resident.spec.name] = resident

        def gone() -> None:
            if not resident.leaving:
                self.ended(resident)

        if resident.sandbox.alive():
            watch(resident, gone)
        else:
            gone()

    def resident(self, capsule: str) -> RunningCapsule:
        """The capsule of that name; raises NotFound when it is not here."""
        found = self.capsules.get(capsule)
        if found is None:
            raise NotFound(f"{capsule} is not on {self.host}")
        return found

    def rewinds(self) -> dict[str, int]:
        """How often each job was rewound, as far as this host knows. Jobs that never were are not
        named."""
        known = [(book.job, book.rewinds) for book in self.books.values()]
        known += [(c.spec.job, c.overlay.rewinds) for c in self.capsules.values()]
        found: dict[str, int] = {}
        for job, rewinds in known:
            if rewinds > found.get(job, 0):
                found[job] = rewinds
        return found

    def refuse_older(self, request: messages.Reserve) -> None:
        """Raises Refused when a newer epoch than the one announced is known here already, or a
        later rewind of the job; also while a copy from before the announced rewind is left here.

        The announced epoch itself may be known if it is this host's: a rewind gives an address to
        its host before the sandbox is reserved. But nothing may have run here under it.
        """
        name, book = request.spec.name, request.book
        known, here = self.books.get(request.spec.job), self.capsules.get(name)
        if known is not None and book.rewinds < known.rewinds:
            raise Refused(f"{name} is from before rewind {known.rewinds} of its job")
        if earlier := self._earlier(book):  # it would speak under the job's new VXLAN id
            raise Refused(
                f"{earlier[0].spec.name} from before rewind {book.rewinds} of its job is left on"
                f" {self.host}"
            )
        address = overlay_of(book).address(request.spec.index)
        owner, epoch = known.where.get(address, ("", 0)) if known else ("", 0)
        awaited = owner == self.host and (here is None or here.epoch < epoch)
        if request.epoch < epoch or (request.epoch == epoch and not awaited):
            raise Refused(f"{name} came under epoch {request.epoch}, and {epoch} is known here")

    async def end_earlier(self, book: Book) -> None:
        """End and remove all that is here of the job's capsules from before the rewind that the
        book is of. Then none of their tasks, namespaces and directories is left. May be repeated.

        Their networks are locked first, so no peer sees that a connection closes. Raises Refused if
        a task does not end. Its capsule stays in the table, and no other copy of it is built here.
        """
        if not book.rewinds:
            return
        first = self._earlier(book)
        self._note_that_run(book, first)
        await self._end_silently(first)
        await self._drop_earlier(book)  # this ends the freeze of what is dead
        earlier = self._earlier(book)  # again: a migration may have let one run meanwhile
        self._note_that_run(book, [resident for resident in earlier if resident not in first])
        await self._end_silently(earlier)
        for resident in earlier:
            name = resident.spec.name
            await self.blocking(name, partial(self._remove_earlier, resident))
            if self.capsules.get(name) is resident:
                del self.capsules[name]

    def ended_running(self, book: Book) -> list[str]:
        """Which capsules :meth:`end_earlier` has ended here, for this count of rewinds, that were
        not frozen. It may be asked again: the first answer may have been lost."""
        rewinds, names = self._ended_running.get(book.job, (0, set()))
        return sorted(names) if rewinds == book.rewinds else []

    def _note_that_run(self, book: Book, earlier: Sequence[RunningCapsule]) -> None:
        run = {resident.spec.name for resident in earlier if not resident.still}
        rewinds, names = self._ended_running.get(book.job, (0, set()))
        if run and rewinds <= book.rewinds:  # else the book comes late
            before = names if rewinds == book.rewinds else set()
            self._ended_running[book.job] = book.rewinds, before | run

    def _remove_earlier(self, resident: RunningCapsule) -> None:
        repeated_output.keep(self.factory, resident)
        resident.remove()

    def _earlier(self, book: Book) -> list[RunningCapsule]:
        of_job = [c for c in self.capsules.values() if c.spec.job == book.job]
        return [c for c in of_job if c.overlay.rewinds < book.rewinds]

    async def _end_silently(self, earlier: Sequence[RunningCapsule]) -> None:
        """End all of them at once, beside the work that is under way for them, which then fails."""
        for resident in earlier:
            resident.leaving = True
        ends = (asyncio.to_thread(resident.end_silently) for resident in earlier)
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def forget_unknown(self, jobs: set[str]) -> None:
        """Remove what is left of jobs that ended while the orchestrator could not reach this host.

        A capsule that runs here is never touched, whether the journal knows it or not: the
        journal may be wrong.
        """
        await self._forget_moved()
        for job in [name for name in self.books if name not in jobs]:
            here = [c for c in self.capsules.values() if c.spec.job == job and c.code is None]
            if here:
                log.error("the orchestrator does not know %s, which runs here", here[0].spec.name)
            else:
                await self.forget_job(messages.Forget(job))
        known = jobs | {capsule.spec.job for capsule in self.capsules.values()}
        await asyncio.to_thread(repeated_output.forget_unknown, self.factory, known)
        await asyncio.to_thread(ran_here.forget_unknown, self.factory, known)

    async def _forget_moved(self) -> None:
        """Remove what is left of capsules that went on elsewhere after this host went down."""
        for name, resident in list(self.capsules.items()):
            book = self.books.get(resident.spec.job)
            address = resident.overlay.address(resident.spec.index)
            owner, epoch = book.where.get(address, (self.host, 0)) if book else (self.host, 0)
            if owner != self.host and epoch > resident.epoch and not resident.sandbox.alive():
                resident.leaving = True
                del self.capsules[name]
                await self.blocking(name, resident.remove)

    async def blocking(self, capsule: str, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, after all earlier work for the same capsule."""
        async with self._locks[capsule]:
            return await asyncio.to_thread(work)

    async def make_way(self, book: Book) -> None:
        """Remove what an earlier job in the same subnet has left here: a subnet belongs to one job.

        This host may not have heard that the earlier job was forgotten. If a capsule of that job
        still runs here, this raises Refused and leaves its network as it is.
        """
        for job in self._jobs_of(book.vni) - {book.job}:
            here = [c for c in self.capsules.values() if c.spec.job == job and c.code is None]
            if here:
                raise Refused(
                    f"{self.host} still runs {here[0].spec.name} in the subnet {book.subnet},"
                    f" which {book.job} is to have",
                    hint=f"`liveshift stop {job} --unknown {self.host}` ends it",
                )
            await self.forget_job(messages.Forget(job))

    def _jobs_of(self, vni: int) -> set[str]:
        booked = {book.job for book in self.books.values() if book.vni == vni}
        return booked | {c.spec.job for c in self.capsules.values() if c.overlay.vni == vni}

    async def start_capsule(self, request: messages.Start) -> None:
        name = request.spec.name
        await self.make_way(request.book)
        async with self.network:
            resident = await self.blocking(
                name, lambda: self.factory.start(request.spec, request.book, request.epoch)
            )
            ran_here.remember(self.factory, name, request.epoch)
        self.admit(resident)
        await self.locate(messages.Locate(request.book))

    async def signal_capsule(self, request: messages.Signal) -> None:
        """Send a signal to the capsule. Raises Refused if it is frozen or soon will be: CRIU may
        have read the pending signals already, and then the signal would be lost with this copy."""
        async with self._signals[request.capsule]:
            resident = self.resident(request.capsule)
            if resident.still:
                raise Refused(f"{request.capsule} is frozen on {self.host} for a move")
            await asyncio.to_thread(resident.send_signal, request.signum)

    async def hold_signals(self, resident: RunningCapsule) -> None:
        """From now until the capsule is thawed, no signal is sent to it."""
        async with self._signals[resident.spec.name]:
            resident.still = True

    async def end_capsule(self, request: messages.End) -> None:
        resident = self.resident(request.capsule)
        if resident.epoch != request.epoch:
            raise Refused(
                f"{request.capsule} is here under epoch {resident.epoch}, not {request.epoch}"
            )
        if resident.code is None:
            await asyncio.to_thread(sandboxes.end, resident.sandbox)

    async def forget_job(self, request: messages.Forget) -> None:
        async with self._forgetting:  # make_way waits here until an earlier removal is complete
            for name in [n for n, c in self.capsules.items() if c.spec.job == request.job]:
                resident = self.capsules.pop(name)
                resident.leaving = True
                await self.blocking(name, resident.remove)
            carried_out.forget_job(self.factory, request.job)
            ran_here.forget_job(self.factory, request.job)
            repeated_output.forget_job(self.factory, request.job)
            self._ended_running.pop(request.job, None)
            book = self.books.pop(request.job, None)
            if book is not None:
                async with self.network:
                    if not self._jobs_of(book.vni):
                        await asyncio.to_thread(network.lower_overlay, overlay_of(book))

    async def locate(self, request: messages.Locate) -> None:
        """Enter the addresses that are newer than the known ones; return when they are in force.

        The first book of a rewind ends the earlier copies here, before any of its addresses count.
        """
        book = request.book
        await self.make_way(book)
        await self.end_earlier(book)
        async with self.network:
            known = self.books.get(book.job)
            if known is not None and book.rewinds < known.rewinds:
                return
            newer = {
                address: (host, epoch)
                for address, (host, epoch) in book.where.items()
                if known is None or epoch > known.where.get(address, ("", 0))[1]
            }
            rewound = known is not None and book.rewinds > known.rewinds
            if not (newer or rewound):
                return
            merged = {**(known.where if known else {}), **newer}
            table = {
                address: None if host == self.host else self.cluster.host(host).address
                for address, (host, _) in (merged if rewound else newer).items()
            }

            def enter() -> None:
                # A restarted agent may read another cluster file than the agent before it.
                network.locate(self.factory.raise_overlay(book, lay_again=known is None), table)

            self.books[book.job] = Book(book.job, book.vni, book.subnet, merged, book.rewinds)
            try:
                await asyncio.to_thread(enter)
            except BaseException:  # the next book brings these addresses again
                self.books[book.job] = known or Book(book.job, book.vni, book.subnet, {})
                raise

    async def get_inspection(self, request: messages.GetInspection) -> messages.Inspection:
        """The state of the capsule's processes. It only reads, so it waits for no other work."""
        resident = self.resident(request.capsule)
        states = await asyncio.to_thread(rank_pages.states, resident)
        return messages.Inspection(request.capsule, self.host, states)

    async def read_repeated(self, request: messages.ReadRepeated) -> messages.Repeated:
        return await asyncio.to_thread(repeated_output.read, self.factory, request)

    async def read_output(self, request: messages.ReadOutput) -> messages.Output:
        until = time.monotonic() + request.wait
        while True:
            resident = self.resident(request.capsule)
            code = resident.code  # before the read, so that all output before the end is read
            at, data = await asyncio.to_thread(resident.read_output, request.offset)
            done = code is not None and not data
            rewound = output.rewinds_at(at) > output.rewinds_at(request.offset)
            if not (data or done or rewound):
                at = request.offset  # the next answer with data reports the missing bytes
            if data or done or rewound or time.monotonic() > until:
                dropped = at - request.offset
                return messages.Output(data, at + len(data), code if done else None, dropped)
            await asyncio.sleep(OUTPUT_POLL_S)
