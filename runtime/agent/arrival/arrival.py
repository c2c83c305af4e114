# SPDX-License-Identifier: Apache-2.0
"""The destination's side of a migration: a reserved room, what has come for it, the restore.

Images lie in memory (a tmpfs under the run directory) and nowhere else. Methods block; the
agent runs them in a thread. Order: the image comes (inbox.py); ``bring_up`` restores the tree up
to where it would run; once it was ruled so, ``let_run``. A restore that failed may be tried
again: the room stays, with what was unpacked into it.

What an agent that was started anew needs lies beside the image: the Reserve that announced it,
and (inbox.py) what had come when it was complete.
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
from ....criu_glue.capsule.room import Room, adopt, started
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
from ..departure.small_images import Packer
from ..gpu.device_memory import TABLE, DeviceInlet, Pump, decode
from ..gpu.devices import Devices, DeviceTree
from ..host import carried_out
from ..host.resident import Housing, Resident
from .inbox import Inbox

log = logging.getLogger("liveshift.arrival")

NOTE = "arrival"


class ArrivalNote(msgspec.Struct, frozen=True):
    """What an agent that was started anew needs to know, besides what the inbox keeps."""

    reserve: Reserve
    init: int
    init_started: int
    gpus: Pairs = msgspec.field(default_factory=list)


class Arrival:
    """One capsule on its way into this host: a reserved room and what has come for it.

    ``gpus``: the GPU here for each of the source's.
    """

    def __init__(
        self, reserve: Reserve, resident: Resident, housing: Housing,
        devices: DeviceTree | None = None, gpus: Pairs | None = None,
    ) -> None:  # fmt: skip
        self.migration = reserve.migration
        self._devices = devices
        self._find_devices: Callable[[], DeviceTree | None] = lambda: None
        self.source = reserve.source
        self.gpus = gpus or []
        self.resident = resident
        self._reserve = reserve
        self._housing = housing
        self.images = housing.images(reserve.migration)
        self.images.mkdir(parents=True, exist_ok=True)
        inlet = None
        if devices is not None:
            inlet = DeviceInlet(devices.helper, reserve.migration, dict(self.gpus))
        self.inbox = Inbox(
            self.images, resident, housing.placement.carried, inlet, reserve.limit_bytes
        )
        self._tree = RestoringTree(resident.room, self.images)
        self._early: EarlyCriu | None = None
        self._nothing_placed = ""  # why, in words
        self._settled_files = False
        self.failed_epoch = 0  # of the last attempt that failed: a late ask for it is over, too
        self.failed = ""  # why it did
        self.granted = 0  # the epoch under which it may run; 0 for none yet

    @property
    def gpus_promised(self) -> list[str]:
        """The GPUs here that will hold what the capsule uses at its source."""
        used = self._reserve.gpu.used if self._reserve.gpu else {}
        return [new for old, new in self.gpus if old in used]

    def note(self) -> None:
        """Write down what :meth:`take_up` needs."""
        room = self.resident.room
        note = ArrivalNote(self._reserve, room.init, room.started, self.gpus)
        (self.images / NOTE).write_bytes(msgspec.msgpack.encode(note))

    @classmethod
    def take_up(cls, migration: str, housing: Housing, devices: Devices) -> Arrival | None:
        """What an earlier agent has left; None when the image is not complete or its room gone."""
        try:
            raw = (housing.images(migration) / NOTE).read_bytes()
            note = msgspec.msgpack.decode(raw, type=ArrivalNote)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        room = Room(housing.plan(note.reserve.spec), note.init, note.init_started)
        resident = housing.resident(note.reserve, room)
        here = cls(note.reserve, resident, housing, None, note.gpus)
        here._find_devices = lambda: devices.left(migration, resident)
        here._tree.take_up()
        # One that may run has its memory, and may have used up what came (MemoryStore.spend).
        if not (here.inbox.take_up() or (here.complete and resident.noted())) or not room.alive():
            return None
        return here

    @property
    def complete(self) -> bool:
        """Whether all of the image is here; then its source has promised to wait."""
        return self.inbox.complete

    @property
    def used_up(self) -> bool:
        """Whether an attempt to restore has left nothing to try again with: what it put in its
        place was kept nowhere else."""
        if not self.failed_epoch or (memory := self.inbox.memory) is None:
            return False
        return memory.spent or (self._early is None and memory.absent > 0)

    @property
    def room_stands(self) -> bool:
        return started(self.resident.room.init) == self.resident.room.started

    @property
    def placed(self) -> tuple[int, bool]:
        """Bytes of cold memory that are in place ahead, and whether there is more to place."""
        return (self._early.bytes, self._early.placing) if self._early is not None else (0, False)

    def start_early(self, criu: Criu) -> None:
        """Have a CRIU take in what is cold of the memory that comes, before it is to restore."""

        def begin(store: MemoryStore) -> None:
            self._early = early = EarlyCriu(criu, self.resident.room, self.images, store)
            self.inbox.stands_still = early.halt
            self.inbox.memory_lost = lambda: early.lost
            early.begin()

        self.inbox.memory_comes = begin

    def bring_up(self, criu: Criu, watch: Stopwatch, deadline_s: float) -> None:
        """Restore the tree up to where it would run; raises StepFailed with no task left."""
        with watch.phase("verify", frozen=True) as lap:
            self.inbox.close()
            if not self.complete:
                raise StepFailed("restore", "the image is not complete")
            manifest = self.inbox.manifest
            self._need_memory()
            if not self._settled_files:  # not again: what came is here, what is gone is gone
                for tree, names in manifest.gone().items():
                    put_here = self.inbox.written.get(tree, set())
                    trees.remove(self.inbox.top(tree), put_here.intersection(names))
                carried_out.reconcile(self._housing, self.resident.spec.name, self.inbox.came)
                self._settled_files = True
            plan = self.resident.room.plan
            user = User(plan.uid, plan.gid, plan.groups)
            image_check.prepare(self.images, user, self.resident.room.root)
            placement, init = self._housing.placement, self.resident.room.init
            shared_sizes.forget(self.images, placement, placement.mounts_of(init))
            lap.detail = f"{len(manifest.streams)} streams"
        reach("destination.restoring")
        with watch.phase("restore", frozen=True) as lap:
            devices = self._devices if self._take_saved() else None
            fill = self._restore(criu, deadline_s, stopped=devices is not None)
            lap.bytes = sum(n for s, (n, _) in manifest.streams.items() if s.startswith("image"))
            if fill is not None:
                seen = fill.seen()
                lap.bytes += seen.bytes + seen.placed
                placed = f"{units.size(seen.placed)} were in place" if seen.placed else ""
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
        """By the CRIU that has memory already, if there is one, else by a fresh one."""
        store, until = self.inbox.memory, time.monotonic() + deadline_s
        early, self._early = self._early, None
        pipes, epoll = self.inbox.manifest.pipes, self.inbox.manifest.epoll
        fill: FillEngine | None
        if early is not None and store is not None:
            early.why = early.why or self._ids_in_the_way()
            try:
                if early.prepare():
                    spend = _only_once(store.size - early.bytes)
                    fill = FillEngine(self.images, store, plan=early.plan, spend=spend)
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
            fill = FillEngine(self.images, store, spend=_only_once(store.size))
        self._tree.bring_up(
            criu, pipes, until - time.monotonic(), stopped=stopped, fill=fill, epoll=epoll
        )
        return fill

    def _ids_in_the_way(self) -> str:
        """Why a CRIU that was started before the image came may have an id of the tree, in words,
        or "". Its ids were chosen by those that the tree had when it was surveyed."""
        end = pids.limit()
        last = pids.place(self._reserve.survey.ids, end)
        assert last is not None  # its room was made for it
        found = pids.within_reach(last, end, pids.of_image(self.images))
        return f"CRIU may have id {found[0]}, which a task has got meanwhile" if found else ""

    def here(self, epoch: int) -> Locate:
        """Its line of the address book once it was committed to this host."""
        book = self._reserve.book
        where = {
            self.resident.overlay.address(self.resident.spec.index): (self._housing.host, epoch)
        }
        return Locate(Book(book.job, book.vni, book.subnet, where))

    def let_run(self, watch: Stopwatch, epoch: int, deadline_s: float) -> Moved:
        """The ruling was to run: the network opens, the tree goes on.

        Raises StepFailed when it did not; then no task is left.
        """
        with watch.phase("unlock", frozen=True):
            here = self.resident
            here.epoch = epoch
            try:
                # Before it runs: should this agent die now, the next one must not take it away.
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
        """What the source has said of device state; whether there is any. Raises StepFailed where
        there is, and no helper: without it none of the processes may go on."""
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
        """An earlier agent was to let it run: whether it runs now."""
        resumed = self._tree.resumed()
        try:
            if self._take_saved() and self._devices is not None:
                if not resumed:
                    self._devices.take_up()
                else:
                    self._devices.take_up(some=True)
                    self._devices.end()
            if not resumed:
                self._let_go(self._housing.cluster.timeouts.suspicion)
        except LiveshiftError as error:
            log.error("%s: %s", self.resident.spec.name, error)
            if not self._tree.resumed():
                self.drop_tree()
                self.resident.unnote()
                return False
        if resumed:
            adopt(self.resident.room)
        return True

    def forward(self, sender: Sender, lanes: Lanes) -> Frozen:
        """Send all of the image on to another host, as its source did."""
        manifest = self.inbox.manifest
        self._need_memory()
        packer = Packer(sender.send)
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
        """Raises StepFailed for an image whose pages are not here any more: CRIU's part of it would
        make a tree of zeros."""
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
        """What came; of the capsule's own directories all there is."""
        top, stream = self.inbox.top(name), f"tree:2:{name}"
        only = None
        if name not in ("tmp", "shm"):
            only = tuple(sorted(self.inbox.came.get(name.removeprefix("carried:"), set())))
        tree = trees.Tree(name, top, top, only)
        trees.pack(
            tree, trees.listing(tree),
            lambda data: sender.send(stream, bytes(data)) if data else None,
        )  # fmt: skip
        sender.send(stream, b"")

    def drop_tree(self) -> None:
        """End what was restored but may not run; room and image stay."""
        self._tree.drop()
        if self._devices is not None:
            with contextlib.suppress(LiveshiftError):  # the helper notes by itself that it ended
                self._devices.end()

    def discard(self) -> None:
        """Drop the room and whatever has arrived. May be called again."""
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
        (self.images / NOTE).unlink(missing_ok=True)  # first: without it nobody takes it up
        self.inbox.forget_memory()
        shutil.rmtree(self.images, ignore_errors=True)


def _only_once(size: int) -> bool:
    """Whether this host lacks the memory to have so many bytes in the store and in the tree."""
    return memory_left() < max(0, size) + LEAST
