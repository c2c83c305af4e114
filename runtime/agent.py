# SPDX-License-Identifier: Apache-2.0
"""The agent: the root daemon on each host. It acts when asked and reports what it sees.

It holds no truth of its own: capsules are processes in the kernel, ownership is the
orchestrator's. Asks are served concurrently; what blocks runs in threads, one at a time for
each capsule.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..criu_glue import network, room
from ..criu_glue.network import Overlay
from ..criu_glue.survey import survey
from ..criu_glue.tool import Criu, find
from ..errors import LiveshiftError, NotFound, Refused, Unreachable
from . import carried_out, host_facts, local_socket, messages, notify, preflight
from .arrival import Arrival
from .config import Cluster
from .departure import Departure
from .link import Uplink
from .messages import Book, Message
from .resident import ROOT_PID, Housing, Resident, interposer_pages, watch
from .stopwatch import Stopwatch
from .wire import Receiver, Sender

log = logging.getLogger("liveshift.agent")
T = TypeVar("T")

THREADS = 64
OUTPUT_POLL_S = 0.03
RESUME_POLL_S = 0.005


class Agent:
    """One host's agent; :meth:`run` serves until cancelled."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self.cluster = cluster
        self.host = host
        self.own = cluster.host(host)
        self.housing = Housing(cluster, host)
        self.criu = _find_criu(cluster)
        self.facts = host_facts.facts(self.criu)
        self.capsules: dict[str, Resident] = {}
        self.departures: dict[str, Departure] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.books: dict[str, Book] = {}
        self.receiver = Receiver(str(self.own.data), cluster.paths.keys, host)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._network = asyncio.Lock()
        self._life = uuid.uuid4().hex
        self._background: set[asyncio.Task[None]] = set()
        self._serve: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.Start: self._start,
            messages.Signal: self._signal,
            messages.End: self._end,
            messages.Forget: self._forget,
            messages.Locate: self._locate,
            messages.Inspect: self._inspect,
            messages.Reserve: self._reserve,
            messages.Precopy: self._precopy,
            messages.Freeze: self._freeze,
            messages.Restore: self._restore,
            messages.Resume: self._resume,
            messages.Thaw: self._thaw,
            messages.Discard: self._discard,
            messages.Finish: self._finish,
            messages.Progress: self._progress,
            messages.ReadOutput: self._read_output,
        }

    async def run(self) -> None:
        """Report to the orchestrator and serve it and the local socket."""
        # Moves block for seconds each; beats and asks must find a thread besides them.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        _memory_for_images(self.cluster.paths.run / "images")
        self.receiver.start()
        await asyncio.to_thread(self.housing.clear_unfinished)
        for resident in await asyncio.to_thread(self.housing.returning):
            self.capsules[resident.spec.name] = resident
            self._watch(resident)
        address = str(self.cluster.orchestrator)
        self.uplink = Uplink(self.host, address, self.cluster.paths.keys, self._handle)
        await local_socket.serve(self.cluster.paths.run / "agent.sock", self._relay)
        notify.ready()
        await asyncio.gather(self.uplink.serve(), self._report())

    # ---- to the orchestrator ----

    async def _report(self) -> None:
        said_hello = False
        while True:
            try:
                if not said_hello:
                    await self._hello()
                    said_hello = True
                    log.info("reported to the orchestrator")
                await self.uplink.line.ask(await self._beat(), self.cluster.timeouts.suspicion)
            except Unreachable as silent:
                log.warning("%s", silent)
                said_hello = False
            except LiveshiftError as error:
                log.error("%s", error)
                said_hello = False
            await asyncio.sleep(self.cluster.timeouts.heartbeat)

    async def _hello(self) -> None:
        epochs = {name: c.epoch for name, c in self.capsules.items() if c.code is None}
        hello = messages.Hello(self.host, self.facts, epochs, self.cluster.digest, self._life)
        answer = await self.uplink.line.ask(hello, self.cluster.timeouts.suspicion)
        assert isinstance(answer, messages.Books)
        for book in answer.books:
            await self._locate(messages.Locate(book))
        await self._discard_left_over(answer)

    async def _discard_left_over(self, answer: messages.Books) -> None:
        """A Discard may not have reached us; what the journal says is ours is never dropped."""
        ours = {a for b in answer.books for a, (host, _) in b.where.items() if host == self.host}
        for name, arrival in list(self.arrivals.items()):
            here = arrival.resident
            if name not in answer.arriving and here.overlay.address(here.spec.index) not in ours:
                await self._discard(messages.Discard(name, here.spec.name))

    async def _beat(self) -> messages.Beat:
        running = [c for c in self.capsules.values() if c.code is None]
        states = [await asyncio.to_thread(c.state) for c in running]
        memory = host_facts.memory_offered(self.own.memory)
        return messages.Beat(self.host, memory, states)

    def _watch(self, resident: Resident) -> None:
        """Tell the orchestrator when the command has ended, until it has heard."""

        def ended() -> None:
            if not resident.leaving:
                task = asyncio.create_task(self._tell_ended(resident))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

        if resident.room.alive():
            watch(resident, ended)
        else:
            ended()

    async def _tell_ended(self, resident: Resident) -> None:
        code = resident.exit_code()
        resident.code = 137 if code is None else code
        network.unplug(resident.overlay, resident.netns, resident.spec.index)
        word = messages.Ended(resident.spec.name, resident.epoch, resident.code)
        while True:
            with contextlib.suppress(LiveshiftError):
                await self.uplink.line.ask(word, self.cluster.timeouts.suspicion)
                return
            await asyncio.sleep(self.cluster.timeouts.heartbeat)

    async def _relay(self, uid: int, ask: Message) -> Message | None:
        """A command line on this host: the orchestrator decides, we say who asks."""
        raw = messages.encode_ask(0, ask)
        return await self.uplink.line.ask(messages.Relay(uid, raw), 3600)

    async def _handle(self, _peer: str, ask: Message) -> Message | None:
        serve = self._serve.get(type(ask))
        if serve is None:
            raise LiveshiftError(f"an agent does not serve {type(ask).__name__}")
        return await serve(ask)

    # ---- capsules ----

    def _resident(self, capsule: str) -> Resident:
        found = self.capsules.get(capsule)
        if found is None:
            raise NotFound(f"{capsule} is not on {self.host}")
        return found

    async def _blocking(self, capsule: str, work: Callable[[], T]) -> T:
        """Run what blocks in a thread, after whatever runs for the same capsule."""
        async with self._locks[capsule]:
            return await asyncio.to_thread(work)

    async def _start(self, ask: messages.Start) -> None:
        name = ask.spec.name
        async with self._network:
            resident = await self._blocking(
                name, lambda: self.housing.start(ask.spec, ask.book, ask.epoch)
            )
        self.capsules[name] = resident
        self._watch(resident)
        await self._locate(messages.Locate(ask.book))

    async def _signal(self, ask: messages.Signal) -> None:
        await asyncio.to_thread(self._resident(ask.capsule).send_signal, ask.signum)

    async def _end(self, ask: messages.End) -> None:
        resident = self._resident(ask.capsule)
        if resident.code is None:
            await asyncio.to_thread(room.end, resident.room)

    async def _forget(self, ask: messages.Forget) -> None:
        for name in [n for n, c in self.capsules.items() if c.spec.job == ask.job]:
            resident = self.capsules.pop(name)
            resident.leaving = True
            await self._blocking(name, resident.remove)
        carried_out.forget_job(self.housing, ask.job)
        book = self.books.pop(ask.job, None)
        if book is not None:
            overlay = Overlay(book.vni, book.subnet)
            async with self._network:
                await asyncio.to_thread(network.lower_overlay, overlay)

    async def _locate(self, ask: messages.Locate) -> None:
        book = ask.book
        known = self.books.get(book.job)
        newer = {
            address: (host, epoch)
            for address, (host, epoch) in book.where.items()
            if known is None or epoch > known.where.get(address, ("", 0))[1]
        }
        merged = {**(known.where if known else {}), **newer}
        self.books[book.job] = Book(book.job, book.vni, book.subnet, merged)
        if not newer:
            return
        table = {
            address: None if host == self.host else self.cluster.host(host).address
            for address, (host, _) in newer.items()
        }

        def enter() -> None:
            network.locate(self.housing.raise_overlay(book), table)

        async with self._network:
            await asyncio.to_thread(enter)

    async def _read_output(self, ask: messages.ReadOutput) -> messages.Output:
        until = time.monotonic() + ask.wait
        while True:
            resident = self._resident(ask.capsule)
            code = resident.code  # before the read: what came before the end is then in it
            data, after = await asyncio.to_thread(resident.read_output, ask.offset)
            done = code is not None and not data
            if data or done or time.monotonic() > until:
                return messages.Output(data, after, code if done else None)
            await asyncio.sleep(OUTPUT_POLL_S)

    # ---- a migration, the source's side ----

    async def _inspect(self, ask: messages.Inspect) -> messages.Inspected:
        resident = self._resident(ask.capsule)
        if resident.code is not None:
            raise Refused(f"{ask.capsule} has ended with code {resident.code}")
        try:
            found = await self._blocking(
                ask.capsule, lambda: survey(resident.room, ROOT_PID, self.housing.placement)
            )
        except ProcessLookupError as gone:
            raise Refused(f"{ask.capsule} is just ending") from gone
        carried = await asyncio.to_thread(_size_of, map(Path, self.housing.placement.carried))
        return messages.Inspected(found, self.facts, carried)

    async def _precopy(self, ask: messages.Precopy) -> messages.Moved:
        if self.criu is None:
            raise Refused(f"CRIU is missing or too old on {self.host}", hint="`liveshift doctor`")
        resident, criu, keys = self._resident(ask.capsule), self.criu, self.cluster.paths.keys
        sender = Sender(ask.migration, ask.endpoint, keys, self.host, ask.destination)
        departure = Departure(ask.migration, resident, self.housing, criu, sender)
        self.departures[ask.migration] = departure
        return await self._blocking(ask.capsule, departure.precopy)

    async def _freeze(self, ask: messages.Freeze) -> messages.Frozen:
        departure = self.departures[ask.migration]
        return await self._blocking(ask.capsule, lambda: departure.freeze(ask.deadline))

    async def _thaw(self, ask: messages.Thaw) -> None:
        departure = self.departures.get(ask.migration)
        if departure is not None:
            departure.resident.epoch = ask.epoch
            await self._blocking(ask.capsule, departure.thaw)
            self.departures.pop(ask.migration, None)  # now: a failed one is tried again when asked
            try:
                departure.resident.note()
            except OSError as error:  # it runs, and that is the answer
                log.error("%s: cannot note its epoch: %s", ask.capsule, error)

    async def _finish(self, ask: messages.Finish) -> None:
        departure = self.departures.get(ask.migration)
        if departure is not None:
            self.capsules.pop(ask.capsule, None)
            await self._blocking(ask.capsule, departure.finish)
            self.departures.pop(ask.migration, None)

    # ---- a migration, the destination's side ----

    async def _reserve(self, ask: messages.Reserve) -> messages.Reserved:
        offered = host_facts.memory_offered(self.own.memory)
        rows = await asyncio.to_thread(
            preflight.check, ask.survey, ask.facts, self.facts, self.criu, offered
        )
        if ask.dry_run:
            return messages.Reserved(rows, "")
        spec = ask.spec
        async with self._network:
            resident = await self._blocking(
                spec.name,
                lambda: self.housing.house_empty(spec, ask.book, ask.epoch, ask.survey.pids),
            )
        arrival = Arrival(ask.migration, ask.source, resident, self.housing)
        self.arrivals[ask.migration] = arrival
        self.receiver.expect(ask.migration, ask.source, arrival.inbox)
        await asyncio.to_thread(preflight.warm, ask.survey.needed)
        return messages.Reserved(rows, f"tcp://{self.own.data}")

    async def _restore(self, ask: messages.Restore) -> messages.Moved:
        arrival, criu = self.arrivals[ask.migration], self.criu
        assert criu is not None  # the preflight has seen it
        name = arrival.resident.spec.name
        moved = await self._blocking(name, lambda: arrival.restore(criu, ask.frozen, ask.deadline))
        arrival.resident.epoch = ask.epoch
        arrival.resident.note()
        self.capsules[name] = arrival.resident
        self._watch(arrival.resident)
        self.receiver.forget(ask.migration)
        del self.arrivals[ask.migration]
        task = asyncio.create_task(asyncio.to_thread(arrival.free_images))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return moved

    async def _resume(self, ask: messages.Resume) -> messages.Moved:
        resident = self._resident(ask.capsule)
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

    async def _discard(self, ask: messages.Discard) -> None:
        self.receiver.forget(ask.migration)
        arrival = self.arrivals.pop(ask.migration, None)
        if arrival is not None:
            async with self._network:
                await self._blocking(ask.capsule, arrival.discard)
            book = self.books.get(arrival.resident.spec.job)
            if book is not None:  # the address is where it was before the room was built
                self.books.pop(book.job)
                await self._locate(messages.Locate(book))

    async def _progress(self, ask: messages.Progress) -> messages.Moved:
        return messages.Moved(self.receiver.received(ask.migration), [])


async def serve(cluster: Cluster, host: str) -> None:
    """Run the agent of ``host`` until cancelled; raises LiveshiftError when it cannot start."""
    if os.geteuid() != 0:
        raise Refused("the agent makes namespaces and runs CRIU, so it must run as root")
    await Agent(cluster, host).run()


def _find_criu(cluster: Cluster) -> Criu | None:
    try:
        path = cluster.paths.criu
        return find(str(path) if path else None)
    except LiveshiftError as error:
        log.warning("%s", error)
        return None


def _memory_for_images(directory: Path) -> None:
    """Images lie in memory: a tmpfs of our own, unless something is mounted there already."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(directory):
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "mode=0700,size=90%", "liveshift", str(directory)],
            check=True,
        )


def _size_of(tops: object) -> int:
    total = 0
    for top in tops:  # type: ignore[attr-defined]
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
    return total
