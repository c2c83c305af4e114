# SPDX-License-Identifier: Apache-2.0
"""The destination's side of a migration: a reserved room, the image that comes, the restore.

Images lie only in memory: on a tmpfs under the run directory. Methods block; the agent runs them in
a thread. Order: the image comes (inbox.py); ``bring_up`` restores the tree up to the point where it
would run; after a ruling, ``let_run`` lets it run. A failed restore may be tried again: the room
stays, with the files that were unpacked into it.

Beside the image lies what a restarted agent needs: the Reserve that announced the capsule, and
(inbox.py) what had come when the image was complete.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from .... import units
from ....criu_glue.capsule.sandboxes import Sandbox, hand_over, started
from ....criu_glue.criu.early import EarlyCriu
from ....criu_glue.criu.restore import RestoringTree
from ....criu_glue.criu.tool import Criu
from ....criu_glue.files import trees
from ....criu_glue.files.rights import User
from ....criu_glue.images import image_check, pids, shared_sizes
from ....criu_glue.memory.fill.fill import FillEngine
from ....criu_glue.memory.prefill.prefill import LEAST, memory_left
from ....criu_glue.memory.store.store import MemoryStore
from ....cuda_snapshot.assignment import Pairs
from ....errors import LiveshiftError, StepFailed
from ...daemon.faultpoints import reach
from ...messages import Book, Frozen, Locate, Moved, Reserve
from ...model.stopwatch import Stopwatch
from ...wire import CHUNK, PAGE_TABLE, Lanes, Sender
from ..departure.small_images import SmallImagePacker
from ..gpu.device_memory import TABLE, DeviceInlet, Pump, decode
from ..gpu.devices import Devices, DeviceTree
from ..host import carried_out
from ..host.running_capsule import CapsuleFactory, RunningCapsule
from .inbox import Inbox

log = logging.getLogger("liveshift.arrival")

NOTE = "arrival"


class IncomingNote(msgspec.Struct, frozen=True):
    """What a restarted agent needs to know besides what the inbox keeps."""

    reserve: Reserve
    init: int
    init_started: int
    gpus: Pairs = msgspec.field(default_factory=list)


class IncomingMigration:
    """One capsule that comes to this host: a reserved room and the parts of its image.

    ``gpus``: the GPU on this host for each GPU of the source.
    """

    def __init__(
        self,
        reserve: Reserve,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        devices: DeviceTree | None = None,
        gpus: Pairs | None = None,
    ) -> None:
        self.migration = reserve.migration
        self._devices = devices
        self._find_devices: Callable[[], DeviceTree | None] = lambda: None
        self.source = reserve.source
        self.gpus = gpus or []
        self.resident = resident
        self._reserve = reserve
        self._factory = factory
        self.images = factory.images(reserve.migration)
        self.images.mkdir(parents=True, exist_ok=True)
        inlet = None
        if devices is not None:
            inlet = DeviceInlet(devices.helper, reserve.migration, dict(self.gpus))
        self.inbox = Inbox(
            self.images, resident, factory.placement.carried, inlet, reserve.limit_bytes
        )
        self._tree = RestoringTree(resident.sandbox, self.images)
        self._early: EarlyCriu | None = None
        self._nothing_placed = ""  # why no memory was in place before the restore, in words
        self._settled_files = False
        self.failed_epoch = 0  # the epoch of the last failed attempt: a late ask for it fails too
        self.failed = ""  # why that attempt failed
        self.granted = 0  # the epoch under which the tree may run; 0 until a ruling allows it

    @property
    def gpus_promised(self) -> list[str]:
        """The GPUs on this host that will replace those that the capsule uses at its source."""
        used = self._reserve.gpu.used if self._reserve.gpu else {}
        return [new for old, new in self.gpus if old in used]

    def note(self) -> None:
        """Write down what :meth:`take_up` needs."""
        sandbox = self.resident.sandbox
        note = IncomingNote(self._reserve, sandbox.init, sandbox.started, self.gpus)
        (self.images / NOTE).write_bytes(msgspec.msgpack.encode(note))

    @classmethod
    def take_up(
        cls, migration: str, factory: CapsuleFactory, devices: Devices
    ) -> IncomingMigration | None:
        """The arrival that an earlier agent left; None without a complete image and its room."""
        try:
            raw = (factory.images(migration) / NOTE).read_bytes()
            note = msgspec.msgpack.decode(raw, type=IncomingNote)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        sandbox = Sandbox(factory.plan(note.reserve.spec), note.init, note.init_started)
        resident = factory.resident(note.reserve, sandbox)
        here = cls(note.reserve, resident, factory, None, note.gpus)
        here._find_devices = lambda: devices.left(migration, resident)
        here._tree.take_up()
        # A tree that may run has its memory, and the store may have freed its pages
        # (MemoryStore.free_after_copy).
        if (
            not (here.inbox.take_up() or (here.complete and resident.noted()))
            or not sandbox.alive()
        ):
            return None
        return here

    @property
    def complete(self) -> bool:
        """Whether the whole image is here; its source has then promised to wait."""
        return self.inbox.complete

    @property
    def used_up(self) -> bool:
        """True if a failed restore consumed the only copy of the pages, so that no retry is
        possible."""
        if not self.failed_epoch or (memory := self.inbox.memory) is None:
            return False
        return memory.frees_after_copy or (self._early is None and memory.lost > 0)

    @property
    def sandbox_stands(self) -> bool:
        return started(self.resident.sandbox.init) == self.resident.sandbox.started

    @property
    def placed(self) -> tuple[int, bool]:
        """Bytes of cold memory that are in place before the restore, and whether more will be."""
        return (self._early.bytes, self._early.placing) if self._early is not None else (0, False)

    def start_early(self, criu: Criu) -> None:
        """Start a CRIU that puts cold memory into the room before the image is complete."""

        def begin(store: MemoryStore) -> None:
            self._early = early = EarlyCriu(criu, self.resident.sandbox, self.images, store)
            self.inbox.stands_still = early.halt
            self.inbox.memory_lost = lambda: early.lost
            early.begin()

        self.inbox.memory_comes = begin

    def bring_up(self, criu: Criu, watch: Stopwatch, deadline_s: float) -> None:
        """Restore the tree up to where it would run. Raises StepFailed with no task left."""
        with watch.phase("verify", frozen=True) as lap:
            self.inbox.close()
            if not self.complete:
                raise StepFailed("restore", "the image is not complete")
            manifest = self.inbox.manifest
            self._need_memory()
            if not self._settled_files:  # once: a repeated attempt finds the files settled
                for tree, names in manifest.gone().items():
                    put_here = self.inbox.written.get(tree, set())
                    trees.remove(self.inbox.top(tree), put_here.intersection(names))
                carried_out.reconcile(self._factory, self.resident.spec.name, self.inbox.came)
                self._settled_files = True
            plan = self.resident.sandbox.plan
            user = User(plan.uid, plan.gid, plan.groups)
            image_check.prepare(self.images, user, self.resident.sandbox.root)
            placement, init = self._factory.placement, self.resident.sandbox.init
            shared_sizes.forget(self.images, placement, placement.mounts_of(init))
            lap.detail = f"{len(manifest.streams)} streams"
        reach("destination.restoring")
        with watch.phase("restore", frozen=True) as lap:
            devices = self._devices if self._take_saved() else None
            fill = self._restore(criu, deadline_s, stopped=devices is not None)
            lap.bytes = sum(n for s, (n, _) in manifest.streams.items() if s.startswith("image"))
            if fill is not None:
                seen = fill.seen()
                lap.bytes += seen.bytes + seen.preplaced
                placed = f"{units.size(seen.preplaced)} were in place" if seen.preplaced else ""
                lap.detail = placed or self._nothing_placed
        if devices is not None:
            try:
                self._tree.stop_at_door(deadline_s)
                devices.arrive(watch, self.gpus)
            except BaseException:
                self.drop_tree()
                raise
            reach("destination.devices_back")

    def _restore(self, criu: Criu, deadline_s: float, *, stopped: bool) -> FillEngine | None:
        """Restore with the early CRIU if there is one that works, else with a fresh one."""
        store, until = self.inbox.memory, time.monotonic() + deadline_s
        early, self._early = self._early, None
        pipes, epoll = self.inbox.manifest.pipes, self.inbox.manifest.epoll
        fill: FillEngine | None
        if early is not None and store is not None:
            early.why = early.why or self._ids_in_the_way()
            try:
                if early.prepare():
                    free_after_copy = _only_once(store.size - early.bytes)
                    fill = FillEngine(
                        self.images, store, plan=early.plan, free_after_copy=free_after_copy
                    )
                    self._tree.bring_up(
                        criu,
                        pipes,
                        deadline_s,
                        stopped=stopped,
                        fill=fill,
                        early=early,
                        epoll=epoll,
                    )
                    return fill
                self._nothing_placed = f"all was filled in now: {early.why}"
            except StepFailed as error:
                self._nothing_placed = f"all was filled in now: {error}"
                log.warning("%s: without memory in place: %s", self.migration, error)
            finally:
                early.close()
        fill = None
        if store is not None:
            fill = FillEngine(self.images, store, free_after_copy=_only_once(store.size))
        self._tree.bring_up(
            criu, pipes, until - time.monotonic(), stopped=stopped, fill=fill, epoll=epoll
        )
        return fill

    def _ids_in_the_way(self) -> str:
        """Why an early CRIU may have an id that the tree needs, in words; "" if none does. The ids
        for CRIU were chosen to avoid those that the tree had at its survey."""
        end = pids.limit()
        last = pids.place(self._reserve.survey.ids, end)
        assert last is not None  # the room was made with it
        found = pids.within_reach(last, end, pids.of_image(self.images))
        return f"CRIU may have id {found[0]}, which a task has got meanwhile" if found else ""

    def here(self, epoch: int) -> Locate:
        """The address book's line for this capsule after the commit to this host."""
        book = self._reserve.book
        where = {
            self.resident.overlay.address(self.resident.spec.index): (self._factory.host, epoch)
        }
        return Locate(Book(book.job, book.vni, book.subnet, where))

    def let_run(self, watch: Stopwatch, epoch: int, deadline_s: float) -> Moved:
        """Open the network and let the tree go on, after the ruling to run.

        Raises StepFailed if the tree does not go on; then no task is left.
        """
        with watch.phase("unlock", frozen=True):
            here = self.resident
            here.epoch = epoch
            try:
                # The note comes first: if this agent dies now, the next one must keep the tree.
                here.note()
                reach("destination.granted")
                self._let_go(deadline_s)
            except Exception as error:
                if not self._tree.resumed():
                    self.drop_tree()
                    here.unnote()
                    raise StepFailed("restore", f"it could not be let go: {error}") from error
                log.exception("%s runs, though", here.spec.name)
        return Moved(self.inbox.manifest.image_bytes, watch.phases)

    def _take_saved(self) -> bool:
        """Read the source's table of device state; return whether there is any. Raises StepFailed
        if there is, but no GPU helper: without the helper none of the processes may go on."""
        if TABLE not in self.inbox.manifest.streams:
            return False
        self._devices = self._devices or self._find_devices()
        if self._devices is None:
            raise StepFailed(
                "restore",
                "the image has device state, and the GPU helper of this host can't be reached",
                hint="its log is gpu-helper.log in the run directory",
            )
        self._devices.saved = decode((self.images / TABLE).read_bytes())
        return bool(self._devices.saved)

    def _let_go(self, deadline_s: float) -> None:
        if self._take_saved() and self._devices is not None:
            self._tree.let_run_held(self._devices)
        else:
            self._tree.let_run(deadline_s)

    def finish_letting_run(self) -> bool:
        """Finish what an earlier agent began when it let the tree run; whether the tree runs."""
        resumed = self._tree.resumed()
        try:
            if self._take_saved() and self._devices is not None:
                if not resumed:
                    self._devices.take_up()
                else:
                    self._devices.take_up(some=True)
                    self._devices.end()
            if not resumed:
                self._let_go(self._factory.cluster.timeouts.suspicion)
        except LiveshiftError as error:
            log.error("%s: %s", self.resident.spec.name, error)
            if not self._tree.resumed():
                self.drop_tree()
                self.resident.unnote()
                return False
        if resumed:
            hand_over(self.resident.sandbox)
        return True

    def forward(self, sender: Sender, lanes: Lanes) -> Frozen:
        """Send the whole image to another host, as its source did."""
        manifest = self.inbox.manifest
        self._need_memory()
        packer = SmallImagePacker(sender.send)
        for path in self.images.glob("*.img"):
            self._forward_file(functools.partial(packer, path.name), path)
        packer.finish()
        for stream in manifest.streams:
            kind, _, name = stream.partition(":")
            if kind == "output":
                send = functools.partial(sender.send, stream)
                self._forward_file(send, self.inbox.path(kind, name))
        if self.inbox.memory is not None:
            self._forward_memory(self.inbox.memory, sender, lanes)
        self._take_saved()
        pump = Pump(self._devices, sender.send)
        try:
            for tree in sorted({s.split(":", 2)[2] for s in manifest.streams if s[:5] == "tree:"}):
                self._forward_tree(sender, tree)
            pump.finish()
        finally:
            pump.stop()  # it must not use the sender once that is closed
        sender.send_manifest(
            manifest.capsule,
            manifest.image_bytes,
            manifest.pipes,
            manifest.gone(),
            lanes.end(),
            manifest.epoll,
        )
        sender.finish()
        return Frozen(manifest.image_bytes, [])

    def _need_memory(self) -> None:
        """Raises StepFailed if the image's pages are gone: CRIU would restore a tree of zeros."""
        if PAGE_TABLE in self.inbox.manifest.streams and self.inbox.memory is None:
            raise StepFailed("restore", "the memory that came with the image is used up")

    @staticmethod
    def _forward_memory(store: MemoryStore, sender: Sender, lanes: Lanes) -> None:
        store.forward(lanes.pages)
        lanes.finish()
        sender.send(PAGE_TABLE, msgspec.msgpack.encode(store.table))
        sender.send(PAGE_TABLE, b"")

    @staticmethod
    def _forward_file(send: Callable[[bytes], None], path: Path) -> None:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                send(data)
        send(b"")

    def _forward_tree(self, sender: Sender, name: str) -> None:
        """Send a directory as it came; of the capsule's own directories, all that they contain."""
        top, stream = self.inbox.top(name), f"tree:2:{name}"
        only = None
        if name not in ("tmp", "shm"):
            only = tuple(sorted(self.inbox.came.get(name.removeprefix("carried:"), set())))
        tree = trees.Tree(name, top, top, only)
        trees.pack(
            tree,
            trees.listing(tree),
            lambda data: sender.send(stream, bytes(data)) if data else None,
        )
        sender.send(stream, b"")

    def drop_tree(self) -> None:
        """End a restored tree that may not run; room and image stay."""
        self._tree.drop()
        if self._devices is not None:
            with contextlib.suppress(LiveshiftError):  # the helper notices the end by itself
                self._devices.end()

    def discard(self) -> None:
        """Remove the room and all that has arrived. A second call does no harm."""
        self.inbox.close()
        if self._early is not None:
            self._early.drop()
        self.resident.leaving = True
        self.resident.remove()
        self.free_images()

    def free_images(self) -> None:
        if self._devices is not None or self.gpus:
            self._devices = self._devices or self._find_devices()
        if self._devices is not None:
            self._devices.drop()
        if self._early is not None:
            self._early.drop()
        (self.images / NOTE).unlink(missing_ok=True)  # first: without it no agent takes this up
        self.inbox.forget_memory()
        shutil.rmtree(self.images, ignore_errors=True)


def _only_once(size: int) -> bool:
    """Whether this host lacks the memory to hold ``size`` bytes in the store and in the tree."""
    return memory_left() < max(0, size) + LEAST
