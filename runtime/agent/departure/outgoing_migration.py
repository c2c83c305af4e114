# SPDX-License-Identifier: Apache-2.0
"""The source's side of a migration.

A capsule with CUDA processes has a DeviceTree. Its device state leaves the GPUs before CRIU dumps,
and the GPU helper then holds that memory; the helper sends it at the same time as CRIU's image. The
capsule's own memory goes the same way if the tracker can follow it (precopy.py): pre-copy sends
most of it, and CRIU dumps none of it. If the tracker cannot follow it, CRIU's image contains all of
it.

Order: ``precopy`` while the job trains, ``freeze`` to dump and hold the tree (wire_dump.py), then
exactly one of ``thaw`` (the tree goes on here) and ``finish`` (it has moved). Within ``freeze`` the
source *promises*: before that it may thaw by itself, afterwards only after a ruling. The promise
comes before the manifest, so a complete image proves that the source has promised.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence

from .... import background
from ....criu_glue.criu.tool import Criu
from ....criu_glue.network import network_lock
from ....errors import Refused, StepFailed
from ...daemon.faultpoints import reach
from ...messages import Frozen, Moved, StartPrecopy
from ...model.stopwatch import Stopwatch
from ...wire import Sender
from ..gpu.devices import DeviceTree, FindDevices, no_devices
from ..host.running_capsule import CapsuleFactory, RunningCapsule
from . import freeze_obstacles
from .frozen_capsule import FrozenCapsule
from .outgoing_files import OutgoingFiles
from .outgoing_memory import NEVER, OutgoingMemory, OutgoingWire
from .outgoing_note import OutgoingNote, has_promised, write_promise
from .outgoing_phase import ALLOWED, OutgoingPhase
from .wire_dump import WireDump


class OutgoingMigration:
    """One capsule that leaves this host.

    ``wire``: None for one that an earlier agent began: it is only thawed or finished. ``devices``:
    the capsule's CUDA processes, if any. ``gpus``: UUIDs of the GPUs that the capsule uses here.
    They stay reserved while it may come back. ``find_devices``: finds ``devices`` of an earlier
    agent.

    Methods block, and the agent runs them in a thread, one at a time. Any thread may call
    ``abandon``, ``end_sooner``, ``gates_close`` and ``gates_open`` meanwhile.
    """

    def __init__(
        self,
        migration: str,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        wire: OutgoingWire | None = None,
        devices: DeviceTree | None = None,
        gpus: Sequence[str] = (),
        find_devices: FindDevices = no_devices,
    ) -> None:
        self.migration = migration
        self.resident = resident
        self.gpus = list(gpus)
        self.phase = OutgoingPhase.PREPARING
        self._factory = factory
        self._sender = wire.sender if wire is not None else None
        self._images = factory.images(migration)
        self._files = OutgoingFiles(resident, factory)
        self._memory = OutgoingMemory(resident, factory, wire)
        self._frozen = FrozenCapsule(resident, self._images, devices, find_devices)
        self._abandoned = False

    @classmethod
    def recover(
        cls,
        migration: str,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        gpus: Sequence[str],
        find_devices: FindDevices,
    ) -> OutgoingMigration:
        """One whose freeze an earlier agent began: its tree may be frozen, or it holds it."""
        here = cls(migration, resident, factory, gpus=gpus, find_devices=find_devices)
        here._frozen.take_up()
        here.phase = OutgoingPhase.PROMISED if here.promised else OutgoingPhase.FREEZING
        return here

    # ---- phases --------------------------------------------------------------------------------

    def _enter(self, phase: OutgoingPhase) -> None:
        now = self.phase
        assert phase is now or phase in ALLOWED[now], f"{now} may not become {phase}"
        self.phase = phase

    def check_may_freeze(self) -> None:
        """Raises Refused if a freeze has begun already: the request came late, or twice."""
        if self.promised:
            raise Refused(f"{self.resident.spec.name} is held frozen already")
        if self.phase is not OutgoingPhase.PRECOPYING:
            raise Refused(f"{self.migration} cannot freeze its capsule: it is {self.phase.value}")

    @property
    def promised(self) -> bool:
        """Whether the source has promised: then only a ruling may let the tree go on here."""
        return has_promised(self._images)

    # ---- while the job trains ------------------------------------------------------------------

    def precopy(self, request: StartPrecopy, asked: float, criu: Criu) -> Moved:
        """Send directories, output and memory while the job trains. Memory goes again and again,
        until the deadline of a request that came at ``asked`` (monotonic seconds). Then ``criu`` is
        started, so that it is ready at the boundary."""
        self._enter(OutgoingPhase.PRECOPYING)
        watch = Stopwatch(asked)  # the orchestrator counts its phases from the request
        if self._frozen.devices is not None:
            self._frozen.devices.warm(self.gpus)
        self._memory.begin(request, watch)
        until = asked + request.deadline
        with watch.phase("files ahead") as lap:
            self._files.send_ahead(self._wire.send)
            network_lock.prepare_lock(self.resident.sandbox.init)
            self._wire.finish()
            lap.bytes = self._wire.bytes
        with watch.phase("pre-copy") as lap:
            if self._memory.on_idle_cores:
                background.begin(self.migration)
            self._memory.send_ahead(until, lap)
            self._files.send_output(self._wire.send)
            soon = time.monotonic() + freeze_obstacles.UNLOCKED_S
            freeze_obstacles.wait_unlocked(
                self.resident.sandbox,
                self._factory.placement,
                min(until, soon),
                lambda: self._abandoned,
            )
        self._frozen.tree.start_ahead(criu, self._memory.page_filter(self._images))
        return Moved(self.sent, watch.phases, chosen=self._memory.chosen)

    def end_sooner(self, seconds: float) -> None:
        """End the pre-copy in ``seconds``: the host must soon be empty."""
        if self.phase in (OutgoingPhase.PREPARING, OutgoingPhase.PRECOPYING):
            background.leave(self.migration)
        self._memory.end_sooner(seconds)

    def gates_close(self) -> None:
        """The job's ranks come to a boundary, so one of its capsules will soon be frozen."""
        self._memory.pause()

    def gates_open(self) -> None:
        """The job's ranks train on."""
        self._memory.resume()

    def abandon(self) -> None:
        """The orchestrator gave up the migration: interrupt sending and dumping. After the promise
        this has no effect."""
        self._abandoned = True
        self._memory.cancel()
        if not self.promised:
            if self._sender is not None:
                self._sender.until = 0.0
            self._memory.give_up()

    # ---- the freeze ----------------------------------------------------------------------------

    def freeze(self, criu: Criu, deadline_s: float) -> Frozen:
        """Freeze the tree, dump it into the wire, promise, complete the image; then hold the tree.

        An error before the promise leaves the tasks running and the network open. An error after
        the promise leaves the tree held.
        """
        self.check_may_freeze()
        self._enter(OutgoingPhase.FREEZING)
        background.leave(self.migration)
        dump = WireDump(
            self.resident,
            self._factory.placement,
            self._images,
            self._wire,
            self._files,
            self._memory,
            self._frozen,
        )
        dump.begin(deadline_s)
        try:
            if self._abandoned:
                raise StepFailed("freeze", "it was cancelled")
            self._dump(dump, criu)
            self._promise()
        except BaseException:
            self.thaw()
            raise
        reach("source.promised")
        self._wire.until = NEVER  # the orchestrator decides from here on
        self._memory.wait_without_end()
        with dump.watch.phase("promise", frozen=True):
            dump.send_manifest()
        return Frozen(dump.sent, dump.watch.phases)

    def _dump(self, dump: WireDump, criu: Criu) -> None:
        name, epoch = self.resident.spec.name, self.resident.epoch
        dump.stop(OutgoingNote(self.migration, name, self.gpus, epoch))
        if self._frozen.devices is not None:
            reach("source.devices_saved")
        with dump.watch.phase("lock", frozen=True):
            dump.lock()
            dump.check(lambda: self._abandoned)
        reach("source.locked")
        dump.dump(criu, "source.dumped")

    def _promise(self) -> None:
        """From here on the tree stays frozen until a ruling, even if CRIU dies."""
        self._files.remember_taken()
        self._frozen.tree.pin()
        write_promise(self._images)
        self._enter(OutgoingPhase.PROMISED)

    @property
    def sent(self) -> int:
        """Bytes sent on all lanes."""
        return self._wire.bytes + self._memory.sent

    @property
    def _wire(self) -> Sender:
        assert self._sender is not None  # see recover
        return self._sender

    # ---- its end -------------------------------------------------------------------------------

    def thaw(self) -> None:
        """Let the tree go on here. May be called again, also after an error."""
        self._enter(OutgoingPhase.THAWING)
        self._frozen.thaw()
        self._close()
        self._enter(OutgoingPhase.RETURNED)

    def finish(self) -> None:
        """The capsule has moved: end the held copy, and remove its sandbox and network. May be
        called again after an error."""
        self._enter(OutgoingPhase.FINISHING)
        reach("source.finishing")
        self._frozen.remove()
        self._close()
        self._enter(OutgoingPhase.MOVED)

    def _close(self) -> None:
        background.end(self.migration)
        self._files.close()
        self._memory.close()
        if self._sender is not None:
            with contextlib.suppress(Exception):
                self._sender.close()
        shutil.rmtree(self._images, ignore_errors=True)
