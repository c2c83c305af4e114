# SPDX-License-Identifier: Apache-2.0
"""The destination's side of a migration: a reserved sandbox, the image that comes, the restore.

Images lie only in memory: on a tmpfs under the run directory. Order: the image comes (inbox.py);
``bring_up`` restores the tree up to the point where it would run; after a ruling, ``let_run`` lets
it run (restore_attempt.py does these steps). A failed restore may be tried again: the sandbox
stays, with the files that were unpacked into it.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial

from ....criu_glue.capsule.sandboxes import hand_over
from ....criu_glue.criu.tool import Criu
from ....criu_glue.files import trees
from ....criu_glue.files.rights import User
from ....criu_glue.images import image_check, reservations, shared_sizes, task_states, timerfds
from ....criu_glue.network import tcp_sockets
from ....cuda_snapshot.assignment import Pairs
from ....errors import LiveshiftError, NotFound, StepFailed
from ...daemon.faultpoints import reach
from ...messages import Book, Frozen, Locate, Moved, Reserve
from ...model.stopwatch import Stopwatch
from ...wire import PAGE_TABLE, Lanes, Sender
from ..gpu.device_memory import DeviceInlet
from ..gpu.devices import Devices, DeviceTree, FindDevices, no_devices
from ..host import carried_out, ran_here
from ..host.finished_operations import finished_by_pid
from ..host.running_capsule import CapsuleFactory, RunningCapsule
from .forwarding import forward_image
from .image_place import SandboxPlace
from .inbox import Inbox
from .incoming_note import read_note, remove_note, write_note
from .incoming_phase import ALLOWED, IncomingPhase
from .memory_ahead import MemoryAhead
from .restored_capsule import RestoredCapsule

log = logging.getLogger("liveshift.incoming")


class IncomingMigration:
    """One capsule that comes to this host: a reserved sandbox and the parts of its image. ``criu``:
    puts cold memory into the sandbox before the image is complete; None if no CRIU can.
    ``devices``: the capsule's CUDA processes, None if it has none. ``gpus``, ``find_devices``: see
    RestoredCapsule. ``idle``: whether this host has idle cores. Methods block; the agent runs them
    in a thread.
    """

    def __init__(
        self,
        reserve: Reserve,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        criu: Criu | None = None,
        devices: DeviceTree | None = None,
        gpus: Pairs | None = None,
        find_devices: FindDevices = no_devices,
        *,
        idle: bool = False,
    ) -> None:
        self.migration = reserve.migration
        self.gpus = gpus or []
        self.resident = resident
        self._reserve = reserve
        self._factory = factory
        self.images = factory.images(reserve.migration)
        self.images.mkdir(parents=True, exist_ok=True)
        inlet = DeviceInlet(devices, dict(self.gpus)) if devices is not None else None
        self._ahead = MemoryAhead(criu, resident.sandbox, self.images, reserve, idle=idle)
        ran = ran_here.last_epoch(factory, resident.spec.name)
        self._back = 0 < reserve.dumped_under <= ran  # to files that are here
        left = partial(carried_out.left_here, factory, resident.spec.name)
        self._place = SandboxPlace(self.images, resident, factory.placement, left, back=self._back)
        self.inbox = Inbox(self._place, inlet, reserve.limit_bytes, self._ahead)
        self._restored = RestoredCapsule(resident, self.images, devices, self.gpus, find_devices)
        self._phase = IncomingPhase.RECEIVING
        self._reconciled = False  # whether the files that came were settled with those from before
        self._failed_epoch = 0  # of the last failed attempt: a late request for it fails too
        self._failed = ""  # why that attempt failed
        self.granted = 0  # the epoch under which the tree may run; 0 until a ruling allows it

    @classmethod
    def recover(
        cls, migration: str, factory: CapsuleFactory, devices: Devices
    ) -> IncomingMigration | None:
        """The one that an earlier agent left; None without a complete image and its sandbox."""
        if (note := read_note(factory.images(migration))) is None:
            return None
        resident = note.reserved(factory)
        here = cls(
            note.reserve,
            resident,
            factory,
            gpus=note.gpus,
            find_devices=lambda: devices.left(migration, resident),
        )
        here._restored.tree.take_up()
        whole, may_run = here.inbox.recover_image(), resident.noted()
        # A tree that may run has its memory, and the store may have freed its pages
        # (MemoryStore.free_after_copy).
        if not (whole or (here.complete and may_run)) or not resident.sandbox.alive():
            here.inbox.forget_memory()  # an open store would keep its pages on the tmpfs
            return None
        here._phase = IncomingPhase.GRANTED if may_run else IncomingPhase.COMPLETE
        return here

    def write_note(self) -> None:
        """Write down what :meth:`recover` needs."""
        write_note(self.images, self._reserve, self.resident.sandbox, self.gpus)

    # ---- phases --------------------------------------------------------------------------------

    @property
    def phase(self) -> IncomingPhase:
        """The receiver's threads complete the image; all other phases are entered here."""
        if self._phase is IncomingPhase.RECEIVING and self.complete:
            return IncomingPhase.COMPLETE
        return self._phase

    def _enter(self, phase: IncomingPhase) -> None:
        now = self.phase
        assert phase is now or phase in ALLOWED[now], f"{now} may not become {phase}"
        self._phase = phase

    def check_may_restore(self, epoch: int) -> None:
        """Raises NotFound if there is nothing to restore from, StepFailed if an attempt under this
        or a later epoch has failed."""
        name, host = self.resident.spec.name, self._factory.host
        if not self.resident.sandbox.alive():
            raise NotFound(f"{host} has no image of {name} (any more)")
        if epoch <= self._failed_epoch:
            raise StepFailed("restore", f"the attempt under epoch {epoch} has failed")
        if self._used_up:
            raise NotFound(
                f"the image of {name} on {host} was used up by an attempt that failed:"
                f" {self._failed}"
            )

    def grant(self, epoch: int) -> None:
        """A ruling allows the tree to run under this epoch."""
        self._enter(IncomingPhase.GRANTED)
        self.granted = epoch

    def fail(self, epoch: int, why: str) -> None:
        """An attempt to restore under this epoch has failed, and has left no task."""
        if self._phase is IncomingPhase.RUNNING:
            return  # the agent is being ended: that cancelled the attempt when the tree just ran
        self._enter(IncomingPhase.FAILED)
        self._failed_epoch = max(self._failed_epoch, epoch)
        self._failed = why

    @property
    def _used_up(self) -> bool:
        """True if a failed restore consumed the only copy of the pages, so that no retry is
        possible."""
        if not self._failed_epoch or (memory := self.inbox.memory) is None:
            return False
        return memory.frees_after_copy or (not self._ahead.usable and memory.lost > 0)

    # ---- what it has ---------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the whole image is here; its source has then promised to wait."""
        return self.inbox.complete

    @property
    def gpus_promised(self) -> list[str]:
        """The GPUs on this host that will replace those that the capsule uses at its source."""
        used = self._reserve.gpu.used if self._reserve.gpu else {}
        return [new for old, new in self.gpus if old in used]

    @property
    def placed(self) -> tuple[int, bool]:
        """Bytes of cold memory that are in place before the restore, and whether more will be."""
        return self._ahead.placed

    def location(self, epoch: int) -> Locate:
        """The address book's line for this capsule after the commit to this host."""
        book, overlay = self._reserve.book, self.resident.overlay
        where = {overlay.address(self.resident.spec.index): (self._factory.host, epoch)}
        return Locate(Book(book.job, book.vni, book.subnet, where, book.rewinds))

    # ---- the restore ---------------------------------------------------------------------------

    def bring_up(self, criu: Criu, watch: Stopwatch, deadline_s: float) -> None:
        """Restore the tree up to where it would run. Raises StepFailed with no task left."""
        with watch.phase("verify", frozen=True) as lap:
            self.inbox.close()
            if not self.complete:
                raise StepFailed("restore", "the image is not complete")
            self._enter(IncomingPhase.RESTORING)
            self._prepare_image()
            lap.detail = f"{len(self.inbox.manifest.streams)} streams"
        reach("destination.restoring")
        with watch.phase("restore", frozen=True) as lap:
            manifest = self.inbox.manifest
            devices = self._restored.saved_devices(manifest)
            if devices is not None:
                stopped = {saved.pid for saved in devices.saved if saved.stopped}
                parents = {parent for saved in devices.saved for parent in saved.parents}
                task_states.let_go_on(self.images, stopped | parents)
            self._ahead.restore(
                self._restored.tree,
                criu,
                self.inbox.memory,
                manifest,
                deadline_s,
                lap,
                stopped=devices is not None,
            )
        if devices is not None:
            self._restored.bring_devices(devices, watch, deadline_s)
            reach("destination.devices_back")

    def _prepare_image(self) -> None:
        self._check_pages()
        if not self._reconciled:  # once: a repeated attempt finds the files settled
            for tree, names in self.inbox.manifest.gone().items():
                put_here = self._place.written.get(tree, set())
                trees.remove(self._place.top(tree), put_here.intersection(names))
            name = self.resident.spec.name
            if self._back:  # most of the files did not come, and none of them may go
                carried_out.drop_note(self._factory, name)
            else:
                carried_out.reconcile(self._factory, name, self._place.left, self._place.came)
            self._reconciled = True
        sandbox = self.resident.sandbox
        user = User(sandbox.plan.uid, sandbox.plan.gid, sandbox.plan.groups)
        image_check.prepare(self.images, user, sandbox.root)
        also = self._place.only_read()
        shared_sizes.forget(self.images, self._factory.placement, sandbox.init, also)
        reservations.mark(self.images)
        timerfds.make_relative(self.images)

    def _check_pages(self) -> None:
        """Raises StepFailed if the image's pages are gone: CRIU would restore a tree of zeros."""
        if PAGE_TABLE in self.inbox.manifest.streams and self.inbox.memory is None:
            raise StepFailed("restore", "the memory that came with the image is used up")

    def let_run(self, watch: Stopwatch, epoch: int, deadline_s: float) -> Moved:
        """Open the network and let the tree go on, after the ruling to run.

        Raises StepFailed if the tree does not go on; then no task is left.
        """
        here = self.resident
        here.finished = finished_by_pid(here.sandbox, self._restored.tree.ids)
        with watch.phase("unlock", frozen=True):
            here.epoch = epoch
            try:
                ran_here.remember(self._factory, here.spec.name, epoch)
                # The note comes first: if this agent dies now, the next one must keep the tree.
                here.note()
                self._place.touch_written()
                reach("destination.granted")
                self._close_outside()
                self._restored.let_go(self.inbox.manifest, deadline_s)
            except Exception as error:
                if not self._restored.tree.resumed():
                    self._restored.drop()
                    here.unnote()
                    raise StepFailed("restore", f"the tree could not go on: {error}") from error
                log.exception("%s runs, though", here.spec.name)
            self._enter(IncomingPhase.RUNNING)
        return Moved(self.inbox.manifest.image_bytes, watch.phases)

    def _close_outside(self) -> None:
        """In a rewind: close the connections that lead out of the job. Their far sides have gone on
        since the snapshot, so the sequence numbers fit no more: a program that reads would wait
        for ever, and what it sends would be taken for a repetition."""
        if not self._reserve.dumped_under:
            return
        here = self.resident
        inside, gateway = here.overlay.subnet, here.overlay.gateway
        try:
            closed = tcp_sockets.abort_all_but(here.sandbox.init, inside, gateway)
        except OSError as error:
            log.error(
                "%s has connections out of its job that cannot be closed: %s", here.spec.name, error
            )
            return
        if closed:
            log.info("%s: connections are closed: %s", here.spec.name, ", ".join(closed))

    # ---- after a restart of the agent ----------------------------------------------------------

    def resume_recovered(self) -> bool:
        """Finish what an earlier agent began when it let the tree run, or drop what there is of a
        tree that may not run yet. Returns whether the tree runs."""
        if self._phase is not IncomingPhase.GRANTED:
            self._restored.drop()
            return False
        resumed = self._restored.tree.resumed()
        if not resumed:
            self._close_outside()
        try:
            limit = self._factory.cluster.timeouts.suspicion
            self._restored.finish_letting_go(self.inbox.manifest, limit)
        except LiveshiftError as error:
            log.error("%s: %s", self.resident.spec.name, error)
            if not self._restored.tree.resumed():
                self._restored.drop()
                self.resident.unnote()
                self._enter(IncomingPhase.FAILED)
                return False
        if resumed:
            hand_over(self.resident.sandbox)
        self._enter(IncomingPhase.RUNNING)
        # All pages are in place. Nobody frees this image later, and an open store would keep its
        # pages on the tmpfs after the image's directory is removed.
        self.inbox.forget_memory()
        return True

    # ---- its end -------------------------------------------------------------------------------

    def forward(self, sender: Sender, lanes: Lanes) -> Frozen:
        """Send the whole image to another host, as its source did."""
        self._check_pages()
        devices = self._restored.saved_devices(self.inbox.manifest)
        return forward_image(self.inbox, self._place, devices, sender, lanes)

    def drop_tree(self) -> None:
        """End a restored tree that may not run; sandbox and image stay."""
        self._restored.drop()

    def discard(self) -> None:
        """Remove the sandbox and all that has arrived. A second call does no harm."""
        self._enter(IncomingPhase.DISCARDED)
        self.inbox.close()
        self._ahead.drop()
        carried_out.add(self._factory, self.resident.spec.name, self._place.of_the_capsule)
        self.resident.leaving = True
        self.resident.remove()
        self.free_images()

    def free_images(self) -> None:
        """Remove the image. An error of the GPU helper comes last: the rest is gone then."""
        try:
            self._restored.drop_devices()
        finally:
            self._ahead.drop()
            remove_note(self.images)  # first: without it no agent takes this up
            self.inbox.forget_memory()
            shutil.rmtree(self.images, ignore_errors=True)
