# SPDX-License-Identifier: Apache-2.0
"""The agent: the root daemon on each host. It carries out requests, and reports the state of its
host. It keeps no state of its own: capsules are processes in the kernel, and the orchestrator knows
who owns them. The agent handles requests concurrently. CapsuleTable handles those about capsules;
SourceHandlers, DestinationHandlers and Rulings handle those about migrations; SnapshotHandlers and
HoldingHandlers handle those about snapshots, at their source and at their holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from ...criu_glue.criu.tool import Criu, find
from ...criu_glue.network import fence, nft_library
from ...errors import LiveshiftError, NotPermitted, Refused, Unreachable
from .. import messages
from ..config.cluster import Cluster, FastPathChoice
from ..control import local_socket
from ..control.kernels import Kernels
from ..control.link import Uplink
from ..daemon import heap, notify, state_lock
from ..daemon.cluster_file import ClusterFile
from ..daemon.tasks import Tasks
from ..messages import Message
from ..messages.answers import expected
from ..model.jobs import KILLED
from .departure.progress import ReportSender
from .destination_handlers import DestinationHandlers
from .gate_handlers import GateHandlers
from .gpu.watch import GpuWatch
from .gpu_swap_handlers import GpuSwapHandlers
from .heartbeats import Heartbeats
from .holding_handlers import HoldingHandlers
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.measures import Measures
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry
from .rulings import Rulings
from .snapshot_handlers import SnapshotHandlers
from .source_handlers import SourceHandlers
from .try_hosts import try_hosts

log = logging.getLogger("liveshift.agent")

REPORTED_S, DELIVERY_S, DELIVERY_LOOK_S = 0.3, 600.0, 0.05
"""The end of a command is reported after at most REPORTED_S seconds. Its network stays for at most
DELIVERY_S seconds, for peers that read slowly what it had sent. The agent looks after
DELIVERY_LOOK_S seconds whether they have it all, and again after a tenth of the time waited."""
THREADS = 64


class Agent:
    """The agent of one host; :meth:`run` serves until it is cancelled."""

    def __init__(self, cluster: Cluster, host: str) -> None:
        self.cluster = cluster
        self.host = host
        self.capsule_table = CapsuleTable(cluster, host, self._ended, self._drop_earlier)
        self.gpus = GpuWatch(
            cluster.paths.run,
            cluster.gpu.libraries,
            cluster.gpu.fast_path is not FastPathChoice.OFF,
        )
        self.registry = MigrationRegistry(self.capsule_table, _find_criu(cluster), self.gpus)
        self.rulings = Rulings(self.capsule_table, self.registry, self._claim)
        self.measures = Measures(self.capsule_table)
        report = ReportSender(self._request, cluster.timeouts.suspicion)
        budget = cluster.snapshots.memory or host_facts.memory_for_images()
        self.holding = HoldingHandlers(self.capsule_table, self.registry, self._claim, budget)
        self.source = SourceHandlers(
            self.capsule_table, self.registry, self.measures, report, self.holding.own_bytes
        )
        self.gates = GateHandlers(self.capsule_table, self.registry, self._silence)
        self.destination = DestinationHandlers(
            self.capsule_table,
            self.registry,
            self.rulings,
            self._claim,
            self.measures,
            self.holding,
            self.gates,
        )
        self.heartbeats = Heartbeats(
            cluster,
            host,
            self.capsule_table,
            self.registry,
            self.gpus,
            self.destination,
            self.holding,
        )
        self.swaps = GpuSwapHandlers(self.capsule_table, self.registry)
        self.snapshots = SnapshotHandlers(
            self.capsule_table,
            self.registry,
            self._silence,
            self.holding.own_inbox,
        )
        self._heard = time.monotonic()
        self._boot_id = uuid.uuid4().hex
        self._tasks = Tasks()
        capsule_table, gates, swaps = self.capsule_table, self.gates, self.swaps
        source, destination = self.source, self.destination
        snapshots, holding = self.snapshots, self.holding
        self._serve: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.Start: self._start,
            messages.Signal: capsule_table.signal_capsule,
            messages.End: snapshots.end,
            messages.Forget: capsule_table.forget_job,
            messages.Locate: capsule_table.locate,
            messages.ReadOutput: capsule_table.read_output,
            messages.ReadRepeated: capsule_table.read_repeated,
            messages.GetInspection: capsule_table.get_inspection,
            messages.TryHosts: partial(try_hosts, cluster, Kernels()),
            messages.Inspect: source.inspect,
            messages.Reserve: destination.reserve,
            messages.StartPrecopy: source.precopy,
            messages.EndSooner: source.end_sooner,
            messages.Freeze: source.freeze,
            messages.RestoreCapsule: destination.restore,
            messages.Forward: destination.forward,
            messages.Resume: destination.resume,
            messages.Settle: self.rulings.claim_now,
            messages.Progress: destination.progress,
            messages.StartMeasure: self.measures.start_measure,
            messages.EndMeasure: self.measures.end_measure,
            messages.LookAtGpus: swaps.plan_swap,
            messages.SwapGpu: swaps.swap_gpus,
            messages.SettleSwap: swaps.settle_swap,
            messages.Arm: gates.arm,
            messages.SetTargets: gates.aim,
            messages.Shut: gates.shut,
            messages.ListBehind: gates.list_behind,
            messages.TearDown: gates.tear_down,
            messages.FreshIds: gates.fresh_ids,
            messages.Rebuild: gates.rebuild,
            messages.OpenGate: gates.open,
            messages.StartSnapshot: snapshots.start,
            messages.LockCapsule: snapshots.lock,
            messages.DumpCapsule: snapshots.dump,
            messages.ThawCapsule: snapshots.thaw,
            messages.SealSnapshot: snapshots.seal,
            messages.CloseSnapshot: snapshots.close,
            messages.EndEarlier: snapshots.end_earlier,
            messages.Hold: holding.hold,
            messages.CheckHeld: holding.check,
            messages.GetHeld: holding.facts,
            messages.ForwardHeld: holding.forward,
            messages.CutBack: holding.cut_back,
            messages.SaveHeld: holding.save,
            messages.LoadHeld: holding.load,
            messages.DropSaved: holding.drop_saved,
            messages.WriteManifest: holding.write_manifest,
            messages.ReadManifest: holding.read_manifest,
        }

    async def start(self) -> None:
        """Go on with what an earlier agent left.

        The agent binds its ports first, so it touches nothing if another agent listens. Raises
        LiveshiftError, and then leaves nothing behind.
        """
        # Each move blocks a thread for seconds; heartbeats and requests must still find a free one.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        path = self.cluster.paths.run / "agent.sock"
        with contextlib.ExitStack() as undo:
            self.registry.receiver.start()
            undo.callback(self.registry.receiver.close)
            address = str(self.cluster.orchestrator)
            # The uplink comes first: a command that ended meanwhile is reported at once.
            self.uplink = Uplink(self.host, address, self.cluster.paths.keys, self._handle)
            undo.callback(self.uplink.close)
            listener = local_socket.listen(path)
            undo.callback(path.unlink, missing_ok=True)
            undo.callback(listener.close)
            _memory_for_images(self.cluster.paths.run / "images", undo)
            await asyncio.to_thread(self._hold_fence, undo)
            await self.registry.recover_migrations()
            await self.holding.recover()
            undo.callback(self.holding.close)
            await self.swaps.recover_swaps()
            await local_socket.serve_on(listener, path, self._relay)
            undo.pop_all()
        # This mounts, and the mounts stay. A start that fails does not come this far.
        await asyncio.to_thread(self.registry.keep_kernel_data)
        notify.ready()

    def _hold_fence(self, undo: contextlib.ExitStack) -> None:
        try:
            self.capsule_table.factory.hold_fence()
        except LiveshiftError as error:  # no job will start here, but the host must stay visible
            log.error("users of this host can send to capsules elsewhere as this host: %s", error)
        else:
            undo.callback(fence.release)

    async def run(self) -> None:
        """Report to the orchestrator, and serve it and the local socket."""
        await asyncio.gather(
            self.uplink.serve(),
            self._report(),
            self.rulings.keep_claiming(),
            self.holding.keep_claiming(),
            self.gates.keep(),
            self.snapshots.keep(),
            self.gpus.keep(),
            self._forget_device_memory(),
            heap.give_back(self.idle),
        )

    def idle(self) -> bool:
        """Whether no move or snapshot is under way that a restart of this agent would interrupt."""
        moves = self.registry.outgoing or self.registry.incoming or self.swaps.unfinished()
        return not (moves or self.registry.snapshots.busy or self.holding.busy)

    def objection(self, cluster: Cluster) -> str:
        """Why this agent cannot start with a changed cluster file; "" if it can."""
        own = next((host for host in cluster.hosts if host.name == self.host), None)
        if own is None:
            return f"this host, {self.host}, is not in it any more: stop this agent"
        if own.address != self.cluster.host(self.host).address and self.capsule_table.capsules:
            return f"the address of this host, {self.host}, differs, and capsules run here"
        return ""

    # ---- to the orchestrator ----

    async def _forget_device_memory(self) -> None:
        """Drop, once, what earlier moves left in the GPU helper: the helper outlives an agent."""

        def known() -> set[str]:
            return {*self.registry.outgoing, *self.registry.incoming, *self.swaps.unfinished()}

        while not await asyncio.to_thread(self.registry.devices.drop_all_but, known):
            await asyncio.sleep(self.cluster.timeouts.heartbeat)

    async def _report(self) -> None:
        greeted: int | None = None  # the boot id of the orchestrator with which we registered
        while True:
            try:
                if greeted is None or greeted != self.uplink.connection.peer_boot_id:
                    try:
                        await self._register()
                    finally:
                        await self.registry.let_go_on()
                    greeted = self.uplink.connection.peer_boot_id
                    log.info("reported to the orchestrator")
                await self._request(await self.heartbeats.make(), self.cluster.timeouts.suspicion)
                self._heard = time.monotonic()
            except Unreachable as silent:
                log.warning("%s", silent)
                greeted = None
            except LiveshiftError as error:
                log.error("%s", error)
                greeted = None
            except Exception:  # whatever it is, other jobs of this host need their agent
                log.exception("cannot report to the orchestrator, and tries again")
                greeted = None
            await asyncio.sleep(self.cluster.timeouts.heartbeat)

    async def _register(self) -> None:
        here = self.capsule_table.capsules
        epochs = {name: c.epoch for name, c in here.items()}
        for incoming in self.registry.incoming.values():
            if incoming.granted:  # its tree may run, but the table does not have it yet
                epochs[incoming.resident.spec.name] = incoming.granted
        codes = {name: c.code for name, c in here.items() if c.code is not None}
        register = messages.Register(
            self.host,
            self.registry.facts,
            epochs,
            self.cluster.digest,
            self._boot_id,
            codes,
            self.capsule_table.rewinds(),
            self.holding.held(),
        )
        answer = await self._request(register, self.cluster.timeouts.suspicion)
        books = expected(messages.Books, "the orchestrator", register, answer).books
        stuck = await self._end_earlier(books)
        for book in books:
            if book.job in stuck:
                continue
            try:
                await self.capsule_table.locate(messages.Locate(book))
            except Refused as refused:  # a capsule that the journal does not know uses the subnet
                log.error("the addresses of %s are not entered: %s", book.job, refused)
        await self.capsule_table.forget_unknown({book.job for book in books})

    async def _end_earlier(self, books: Sequence[messages.Book]) -> set[str]:
        """End, before anything else, what runs here from before a rewind; return the jobs of which
        something is left. This host must be heard again nevertheless: it may have other jobs."""
        ends = (self.capsule_table.end_earlier(book) for book in books)
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        stuck = set()
        for book, outcome in zip(books, outcomes, strict=True):
            if isinstance(outcome, Exception):
                log.error("a copy from before the last rewind of %s is left: %s", book.job, outcome)
                stuck.add(book.job)
            elif outcome is not None:
                raise outcome
        return stuck

    async def _drop_earlier(self, book: messages.Book) -> None:
        await self.rulings.drop_earlier(book)

    async def _request(self, message: Message, timeout: float) -> Message | None:
        return await self.uplink.connection.request(message, timeout)

    def _silence(self) -> float:
        """Seconds since the orchestrator was last heard."""
        return time.monotonic() - self._heard

    async def _claim(self, claim: messages.Claim) -> messages.Ruled:
        answer = await self._request(claim, self.cluster.timeouts.suspicion)
        if not isinstance(answer, messages.Ruled):
            raise LiveshiftError(f"the orchestrator answered a claim with {answer!r}")
        return answer

    def _ended(self, resident: RunningCapsule) -> None:
        if self.registry.holds(resident):
            log.error("%s was killed while it was held frozen", resident.spec.name)
            return
        self._tasks.spawn(self._report_ended(resident))

    async def _report_ended(self, resident: RunningCapsule) -> None:
        began = time.monotonic()
        code = resident.exit_code()
        resident.code = KILLED if code is None else code
        removal = asyncio.create_task(self._unplug(resident))
        self._tasks.keep(removal)
        await asyncio.wait({removal}, timeout=REPORTED_S)  # others must learn of it in time
        first = resident.deaths.first
        number, finished = (first.signal, first.collectives) if first else (0, 0)
        dead = resident.found_dead and code is None
        report = messages.CapsuleEnded(
            resident.spec.name,
            resident.epoch,
            resident.code,
            number,
            finished,
            found_dead=dead,
            rebooted=dead and resident.rebooted,
        )
        while True:
            if not resident.found_dead:
                ago = first.ago if first else time.monotonic() - began
                report = msgspec.structs.replace(report, ago_s=ago)
            with contextlib.suppress(LiveshiftError):
                await self._request(report, self.cluster.timeouts.suspicion)
                return
            await asyncio.sleep(self.cluster.timeouts.heartbeat)

    async def _unplug(self, resident: RunningCapsule) -> None:
        """Remove the network of a command that has ended, once its peers have what it had sent: the
        kernel delivers that while the network is there."""
        began, blocking = time.monotonic(), self.capsule_table.blocking
        try:
            while (waited := time.monotonic() - began) < DELIVERY_S:
                if not await blocking(resident.spec.name, resident.delivers):
                    break
                await asyncio.sleep(max(DELIVERY_LOOK_S, waited / 10))
            # In a thread: `ip` and the kernel may take a while, and heartbeats must go on.
            await blocking(resident.spec.name, resident.unplug)
        except Exception:
            log.exception("the network of %s is left", resident.spec.name)

    async def _start(self, request: messages.Start) -> None:
        env = {**await asyncio.to_thread(self.gpus.environment), **request.spec.env}
        spec = msgspec.structs.replace(request.spec, env=env)
        await self.capsule_table.start_capsule(msgspec.structs.replace(request, spec=spec))

    async def _relay(self, uid: int, request: Message) -> Message | None:
        """Pass on a request of a local command: we say who asks, the orchestrator decides."""
        raw = messages.encode_request(0, request)
        return await self._request(messages.Relay(uid, raw), 3600)

    async def _handle(self, _peer: str, request: Message) -> Message | None:
        serve = self._serve.get(type(request))
        if serve is None:
            raise LiveshiftError(f"an agent does not serve {type(request).__name__}")
        return await serve(request)


async def serve(cluster: Cluster, host: str, file: ClusterFile) -> None:
    """Run the agent of ``host`` until its cluster file changes; then the caller must restart it.

    Raises LiveshiftError if the agent cannot start.
    """
    if os.geteuid() != 0:
        raise NotPermitted("the agent makes namespaces and runs CRIU, so it must run as root")
    heap.bound()
    nft_library.hold_open()
    with state_lock.held(cluster.paths.state, "agent"):
        agent = Agent(cluster, host)
        await agent.start()
        try:
            await file.follow(agent.run(), agent.idle, agent.objection)
        except asyncio.CancelledError:  # the agent will not start again
            fence.release()
            raise


def _find_criu(cluster: Cluster) -> Criu | None:
    try:
        path = cluster.paths.criu
        return find(str(path) if path else None)
    except LiveshiftError as error:
        log.warning("%s", error)
        return None


def _memory_for_images(directory: Path, undo: contextlib.ExitStack) -> None:
    """Mount a tmpfs for images, which lie in memory, unless something is mounted there already."""
    directory.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(directory):
        mount = ["mount", "-t", "tmpfs", "-o", "mode=0700,size=90%", "liveshift", str(directory)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LiveshiftError(f"cannot mount memory for images: {done.stderr.strip()}")
        undo.callback(subprocess.run, ["umount", str(directory)], check=False)
