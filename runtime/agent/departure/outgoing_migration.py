# SPDX-License-Identifier: Apache-2.0
"""The source's side of a migration. Every method blocks; the agent runs them in a thread.

A capsule with CUDA processes has a DeviceTree. Its device state leaves the GPUs before CRIU dumps,
and the GPU helper then holds that memory; it goes onto the wire beside CRIU's image. The capsule's
own memory goes the same way if the tracker can follow it (precopy.py): pre-copy sends most of it,
and CRIU dumps none of it. If the tracker cannot follow it, CRIU's image contains all of it.

Order: ``precopy`` while the job trains, ``freeze`` to dump and hold the tree, then exactly one of
``thaw`` (the tree goes on here) and ``finish`` (it has moved). Within ``freeze`` the source
*promises*: before that it may thaw by itself, afterwards only after a ruling. The promise comes
before the manifest, so a complete image proves that the source has promised.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ....criu_glue.capsule import output
from ....criu_glue.capsule.output_sender import OutputSender
from ....criu_glue.capsule.sandboxes import STDERR_FD, STDOUT_FD, end
from ....criu_glue.capsule.tree import in_order
from ....criu_glue.criu.dump import FrozenTree
from ....criu_glue.criu.page_filter import PageFilter
from ....criu_glue.criu.tool import Criu
from ....criu_glue.files import trees
from ....criu_glue.files.trees import Stamp, Tree
from ....criu_glue.images import file_locks
from ....criu_glue.network import network
from ....criu_glue.survey import databases, epoll_sets
from ....criu_glue.survey.survey import Changing, changing, passing
from ....errors import LiveshiftError, Refused, StepFailed, Unreachable
from ...daemon.faultpoints import reach
from ...messages import Frozen, Moved
from ...model.stopwatch import Stopwatch
from ...wire import Sender
from ..gpu.device_memory import Pump
from ..gpu.device_state import DeviceLost
from ..gpu.devices import DeviceTree, has_cuda
from ..host import carried_out
from ..host.running_capsule import ROOT_PID, CapsuleFactory, RunningCapsule
from .precopy import FinalDirtySet, PrecopyRounds, words_of_delta, words_of_rounds
from .small_images import SmallImagePacker

NOTE, PROMISED = "departure", "promised"
"""Files in the migration's directory: ``NOTE`` says that a freeze began, ``PROMISED`` that the
source promised."""

UNLOCKED_S, UNLOCKED_STANDING_S = 3.0, 0.2
"""The source waits at most this many seconds for a moment in which the capsule holds no file lock
that keeps it here: before its ranks come to a boundary, and again after that."""
UNLOCKED_POLL_S = 0.005


class OutgoingNote(msgspec.Struct, frozen=True):
    """What a restarted agent needs to know of a departure."""

    migration: str
    capsule: str
    gpus: list[str] = msgspec.field(default_factory=list)


def carried_trees(resident: RunningCapsule, factory: CapsuleFactory) -> list[Tree]:
    """What moves besides memory: the capsule's /tmp and /dev/shm, and the carried paths.

    /dev/shm comes last, and only when the tree is frozen: it is memory.
    """
    plan = resident.sandbox.plan
    carried = [Tree("carried:" + p, Path(p), Path(p)) for p in factory.placement.carried]
    shm = resident.sandbox.root / "dev/shm"
    return [Tree("tmp", plan.tmp, plan.tmp), *carried, Tree("shm", shm, shm)]


class OutgoingMigration:
    """One capsule that leaves this host.

    ``gpus``: UUIDs of the GPUs that it uses here. They stay reserved while it may come back.
    """

    def __init__(
        self,
        migration: str,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        sender: Sender | None = None,
        devices: DeviceTree | None = None,
    ) -> None:
        self.migration = migration
        self.resident = resident
        self._factory = factory
        self._sender = sender
        self._devices = devices
        self._find_devices: Callable[[], DeviceTree | None] = lambda: None
        self.memory: PrecopyRounds | None = None
        self.full_dump = ""  # why CRIU's image carries all memory at the standstill; "" if not
        self.gpus: list[str] = []
        self._trees = carried_trees(resident, factory)
        self._listed: dict[str, dict[str, Stamp]] = {}
        self._taken: dict[str, dict[str, Stamp]] = {}
        self._log = OutputSender(resident.sandbox)
        self._epoll: list[epoll_sets.EpollEntry] = []
        self._images = factory.images(migration)
        self._frozen = FrozenTree(resident.sandbox, ROOT_PID, self._images)
        self._locked = False
        self._abandoned = False

    @classmethod
    def take_up(
        cls,
        migration: str,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        find_devices: Callable[[], DeviceTree | None],
    ) -> OutgoingMigration:
        """A departure that an earlier agent left in a freeze or holding a frozen tree.

        ``find_devices`` is called when the departure goes on, and again if the GPU helper was
        not there."""
        here = cls(migration, resident, factory)
        here._find_devices = find_devices
        here._frozen.take_up()
        here._locked = resident.still = True
        return here

    def abandon(self) -> None:
        """The orchestrator gave up the migration: interrupt sending and dumping. After the promise
        this has no effect."""
        self._abandoned = True
        if self.memory is not None:
            self.memory.hurry()
        if not self.promised:
            if self._sender is not None:
                self._sender.until = 0.0
            if self.memory is not None:
                self.memory.lanes.until = 0.0

    @property
    def promised(self) -> bool:
        """Whether the source has promised: then only a ruling may let the tree go on here."""
        return (self._images / PROMISED).exists()

    def precopy(self, until: float) -> Moved:
        """Send directories, output and memory while the job trains. Memory goes again and again,
        until ``until`` (monotonic seconds) at the latest."""
        watch = Stopwatch()
        with watch.phase("files ahead") as lap:
            for tree in self._trees[:-1]:
                now = trees.listing(tree)
                self._pack(tree, now, 1)
                self._listed[tree.name] = now
            self._log.send_new(self._wire.send)
            network.prepare_lock(self.resident.sandbox.init)
            self._wire.finish()
            lap.bytes = self._wire.bytes
        with watch.phase("pre-copy") as lap:
            lap.detail = f"full dump: {self.full_dump}"
            if self.memory is not None:
                done = self.memory.rounds(until)
                lap.bytes = done.sent
                lap.detail = words_of_rounds(done)
                self.memory.keep_fresh()
            self._log.send_new(self._wire.send)
            self._passing(min(until, time.monotonic() + UNLOCKED_S))
        return Moved(self.sent, watch.phases)

    def freeze(self, criu: Criu, deadline_s: float) -> Frozen:
        """Freeze the tree, dump it into the wire, promise, complete the image; then hold the tree.

        An error before the promise leaves the tasks running and the network open. An error after
        the promise leaves the tree held.
        """
        if self.promised:
            raise Refused(f"{self.resident.spec.name} is held frozen already")
        watch = Stopwatch()
        self._wire.until = time.monotonic() + deadline_s
        try:
            if self._abandoned:
                raise StepFailed("freeze", "it was cancelled")
            if self.memory is not None:
                with watch.phase("last round", frozen=True) as lap:
                    self.memory.stop_rounds()
                    lap.detail = "interrupted"
            before = self.sent
            removed = self._dump(watch, criu, deadline_s)
            self._promise()
        except BaseException:
            self.thaw()
            raise
        reach("source.promised")
        self._wire.until = float("inf")  # the orchestrator decides from here on
        if self.memory is not None:
            self.memory.lanes.until = float("inf")
        with watch.phase("promise", frozen=True):
            self._send_manifest(removed, self.sent - before)
        return Frozen(self.sent - before, watch.phases)

    def _dump(self, watch: Stopwatch, criu: Criu, deadline_s: float) -> dict[str, list[str]]:
        self._images.mkdir(parents=True, exist_ok=True)
        note = OutgoingNote(self.migration, self.resident.spec.name, self.gpus)
        (self._images / NOTE).write_bytes(msgspec.msgpack.encode(note))
        if self._devices is not None:
            self._devices.save(watch)
            reach("source.devices_saved")
        left = self._wire.until - time.monotonic()
        if left <= 0:
            raise StepFailed("freeze", f"the dump could not begin within {deadline_s:g} s")
        with watch.phase("lock", frozen=True):
            network.lock(self.resident.sandbox.init)
            self._locked = True
            self._look_once_more()
        reach("source.locked")
        pump = Pump(self._devices, self._wire.send)
        delta, page_filter = None, None
        if self.memory is not None:
            page_filter = PageFilter(self._images)
            self.memory.lanes.until = self._wire.until
            delta = FinalDirtySet(self.memory, self._wire, page_filter, self._wire.until)
        try:
            removed = self._dump_tree(watch, criu, left, page_filter, delta)
            if delta is not None:
                with watch.phase("memory", frozen=True) as lap:
                    found = delta.finish()
                    lap.bytes = found.sent_bytes
                    lap.detail = words_of_delta(found)
            if pump.bytes:
                with watch.phase("gpu memory", frozen=True) as lap:
                    lap.bytes = pump.finish()
                    lap.detail = "what was not over yet"
        finally:
            pump.stop()
            if delta is not None:
                delta.stop()
        with watch.phase("ship", frozen=True) as lap:
            self._wire.finish()
            lap.detail = "the rest of the image, on its way"
        return removed

    def _look_once_more(self) -> None:
        """Look for what may have appeared since pre-copy and would make CRIU or the restore fail:
        file locks, and closed files that an epoll set still holds."""
        sandbox = self.resident.sandbox
        if held := self._passing(time.monotonic() + UNLOCKED_STANDING_S):
            text, remedy = held[0]
            raise StepFailed("freeze", f"at that moment {text}", hint=remedy)
        self._epoll, stale = epoll_sets.find(in_order(sandbox, ROOT_PID))
        if stale:
            stale = file_locks.lasting(
                stale, lambda: epoll_sets.find(in_order(sandbox, ROOT_PID))[1]
            )
            self._epoll, _ = epoll_sets.find(in_order(sandbox, ROOT_PID))
        if stale:
            raise StepFailed("freeze", stale[0][0], hint=stale[0][1])

    def _passing(self, until: float) -> list[tuple[str, str]]:
        """What keeps the capsule here at ``until`` (monotonic seconds), and what to do about it.
        Returns [] at the first look that finds nothing."""
        sandbox, placement = self.resident.sandbox, self._factory.placement
        with contextlib.suppress(ProcessLookupError):  # it has ended; a later step reports that
            while (held := passing(sandbox, placement)) and not self._abandoned:
                if time.monotonic() > until:
                    return held
                time.sleep(UNLOCKED_POLL_S)
        return []

    def _dump_tree(
        self,
        watch: Stopwatch,
        criu: Criu,
        deadline_s: float,
        page_filter: PageFilter | None,
        delta: FinalDirtySet | None,
    ) -> dict[str, list[str]]:
        with watch.phase("dump", frozen=True) as lap:
            packer = SmallImagePacker(self._wire.send)
            self._frozen.dump(
                criu,
                packer,
                deadline_s,
                page_filter,
                delta.look if delta is not None else lambda: None,
                self._epoll,
            )
            packer.finish()
            lap.bytes = self._frozen.image_bytes
        reach("source.dumped")
        with watch.phase("files", frozen=True) as lap:
            files_before = self._sent_of_files()
            removed = self._send_changes()
            output.settle(self.resident.sandbox)
            self._log.finish(self._wire.send)
            lap.bytes = self._sent_of_files() - files_before
        return removed

    def _sent_of_files(self) -> int:
        """Bytes of directories and output only: device memory is sent at the same time."""
        sizes = dict(self._wire.streams)
        return sum(n for stream, n in sizes.items() if stream.startswith(("tree:", "output")))

    def _promise(self) -> None:
        """From here on the tree stays frozen until a ruling, even if CRIU dies."""
        carried_out.remember(self._factory, self.resident.spec.name, self._taken)
        self._frozen.pin()
        (self._images / PROMISED).touch()

    @property
    def sent(self) -> int:
        """Bytes sent on all lanes."""
        return self._wire.bytes + (self.memory.lanes.bytes if self.memory is not None else 0)

    def _send_manifest(self, removed: dict[str, list[str]], size: int) -> None:
        sandbox = self.resident.sandbox
        pipes = {sandbox.pipe_inode(fd): fd for fd in (STDOUT_FD, STDERR_FD)}
        lanes = self.memory.lanes.end() if self.memory is not None else {}
        taken_out = self._frozen.taken_out()
        self._wire.send_manifest(self.resident.spec.name, size, pipes, removed, lanes, taken_out)
        self._wire.finish()

    def thaw(self) -> None:
        """Let the tree go on here: tasks first, then the network they expect. A second call does no
        harm."""
        try:
            self._frozen.thaw()
        finally:
            if self._locked and self.resident.sandbox.alive():
                self._unlock()
            self._locked = False
        self.resident.still = False
        self._bring_devices_back()
        self._close()

    def _bring_devices_back(self) -> None:
        devices = self._devices = self._devices or self._find_devices()
        alive = self.resident.sandbox.alive()
        if devices is None:
            if alive and has_cuda(self.resident):
                raise Unreachable(
                    f"the GPU helper, which has the device state of {self.resident.spec.name},"
                    " can't be reached",
                    hint="its log is gpu-helper.log in the run directory",
                )
            return
        if not alive:
            devices.drop()
            return
        try:
            devices.bring_back(Stopwatch())
        except DeviceLost as lost:  # it would hang at its next CUDA call, and so would its job
            end(self.resident.sandbox)
            raise DeviceLost("gpu restore", f"{lost.message}; so it was ended") from lost

    def _unlock(self) -> None:
        try:
            network.unlock(self.resident.sandbox.init)
        except LiveshiftError:
            if self._sender is not None:  # None: the earlier agent may have ended before it locked
                raise

    def finish(self) -> None:
        """The tree has moved: end the held copy, and remove its room and network."""
        reach("source.finishing")
        self.resident.leaving = True
        network.unplug(self.resident.overlay, self.resident.netns, self.resident.spec.index)
        self.resident.remove()
        self._frozen.release()
        devices = self._devices = self._devices or self._find_devices()
        if devices is not None:
            devices.drop()
        self._close()

    @property
    def _wire(self) -> Sender:
        assert self._sender is not None  # a departure without one is only thawed or finished
        return self._sender

    def _close(self) -> None:
        self._log.close()
        if self.memory is not None:
            self.memory.close()
        if self._sender is not None:
            with contextlib.suppress(Exception):
                self._sender.close()
        shutil.rmtree(self._images, ignore_errors=True)

    def _send_changes(self) -> dict[str, list[str]]:
        """Second pass over the directories, exact as nothing writes; returns the removed names."""
        look = changing(self.resident.sandbox, self._factory.placement)
        if look.locks:
            raise StepFailed("freeze", f"at that moment {look.locks[0]}", hint=file_locks.REMEDY)
        if look.databases:
            found = look.databases[0]
            raise StepFailed("freeze", f"at that moment {found}", hint=databases.REMEDY)
        removed: dict[str, list[str]] = {}
        for tree in [*self._trees, *_single(look)]:
            before = self._listed.get(tree.name, {})
            now = trees.listing(tree)
            always = _relative(look.mapped_writable, tree)
            self._pack(tree, trees.changed(before, now, always), 2, always)
            removed[tree.name] = [name for name in before if name not in now]
            if tree.name.startswith("carried:"):
                self._taken[str(tree.source)] = now
        return removed

    def _pack(
        self, tree: Tree, names: Iterable[str], pass_: int, forced: Iterable[str] = ()
    ) -> None:
        stream = f"tree:{pass_}:{tree.name}"
        trees.pack(tree, names, self._into(stream), forced)
        self._wire.send(stream, b"")

    def _into(self, stream: str) -> Callable[[bytes], None]:
        return lambda data: self._wire.send(stream, bytes(data)) if data else None


def _single(look: Changing) -> list[Tree]:
    """Open files in unlisted places of the root file system; each travels as a single file."""
    if not look.single_files:
        return []
    names = tuple(path.lstrip("/") for path in look.single_files)
    return [Tree("open", Path("/"), Path("/"), names)]


def _relative(paths: tuple[str, ...], tree: Tree) -> list[str]:
    """Turn paths as the capsule sees them into names relative to the top of ``tree``."""
    top = {"tmp": "/tmp", "shm": "/dev/shm"}.get(tree.name, str(tree.source))
    return [str(Path(p).relative_to(top)) for p in paths if Path(p).is_relative_to(top)]
