# SPDX-License-Identifier: Apache-2.0
"""The source's side of a snapshot: the image of one capsule goes to a holder, and it runs on here.

Order: ``send_ahead`` while the job trains, ``lock`` at the boundary, ``dump`` once every capsule of
the job is locked, ``thaw`` once every one is dumped. The wait between lock and dump makes one cut
of all images: there is a moment at which all capsules are locked, and none of them receives
anything between that moment and its own dump. So this source keeps its lock from the answer to
``lock`` until the thaw, and refuses ``dump`` after a thaw, whatever the reason of the thaw was.

Nothing is promised. So the source thaws by itself after every error, when the time of ``lock`` is
over, and when it is asked to give up (``abandon``). That costs only the image. A restarted agent
finds the note of the freeze, and thaws (migration_registry.py).

If the capsule has CUDA processes, ``lock`` takes their device state off the GPUs before it locks
the network, as a move does, and the thaw puts it back onto the same GPUs. The driver's checkpoint
copies all of it into the processes' memory, so it is in the image like any other memory.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from .... import background
from ....criu_glue.capsule import sandboxes
from ....criu_glue.criu.tool import Criu
from ....criu_glue.network import network_lock
from ....errors import LiveshiftError, StepFailed
from ...daemon.faultpoints import reach
from ...messages import Frozen, Moved
from ...model import link_rates
from ...model.stopwatch import Lap, Stopwatch
from ..gpu.devices import DeviceTree, no_devices
from ..host.running_capsule import CapsuleFactory, RunningCapsule
from . import freeze_obstacles
from .capsule_tracker import CapsuleTracker
from .frozen_capsule import FrozenCapsule
from .outgoing_files import OutgoingFiles
from .outgoing_memory import OutgoingMemory, OutgoingWire
from .outgoing_note import OutgoingNote
from .outgoing_phase import SnapshotPhase
from .thaw_timer import ThawTimer
from .wire_dump import WireDump

log = logging.getLogger("liveshift.snapshot")

INGRESS_ONLY = False
"""Whether the lock of a snapshot stops only what comes in (network_lock.py). Either way the cut is
consistent. They differ in how soon data in flight arrives after the thaw."""


class SnapshotRequest(Protocol):
    """What a source must know of a snapshot.

    ``generation``: the number of the new image. ``destination``: the holder. ``stands``,
    ``least``: the generation at which its store stands, and the highest incarnation that it knows
    (CapsuleTracker.lend). ``own``: the generation at which this host's store stands, None if it
    takes no copy. ``deadline``: seconds for all that goes ahead.
    """

    @property
    def generation(self) -> int: ...
    @property
    def destination(self) -> str: ...
    @property
    def stands(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def own(self) -> int | None: ...
    @property
    def deadline(self) -> float: ...


class OutgoingSnapshot:
    """One snapshot of one capsule. ``snapshot``: the image's name on the wire. ``devices``: the
    capsule's CUDA processes, if any. ``gpus``: UUIDs of the GPUs that they use. No other capsule
    gets these meanwhile. ``protected``: whether the job has an earlier snapshot to go back to.
    ``ordered``: as in StartSnapshot.

    Methods block, and the agent runs them in threads; they take turns. An error in a step ends the
    snapshot: the capsule runs, and its network is open. If a thaw fails, a thread tries it again
    until it succeeds. Only ``abandon`` returns at once.
    """

    def __init__(
        self,
        snapshot: str,
        resident: RunningCapsule,
        factory: CapsuleFactory,
        wire: OutgoingWire,
        tracker: CapsuleTracker,
        devices: DeviceTree | None = None,
        gpus: Sequence[str] = (),
        *,
        protected: bool = False,
        ordered: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.resident = resident
        self.gpus = list(gpus)
        self._protected = protected
        self._ordered = ordered
        self._off_since = 0.0  # when device state first did not come back; monotonic seconds
        self.phase = SnapshotPhase.PREPARING
        self.complete = False
        """Whether the holder has the whole image."""
        self.early = False
        """Whether the capsule went on after its dump before it was asked to: perhaps before others
        of the job were dumped."""
        self.digest = b""
        """After :meth:`seal` or :meth:`close`: the digest of the image's pages, empty if the image
        is not whole."""
        self._factory = factory
        self._wire = wire
        self._tracker = tracker
        self._generation = 0  # of the image; 0 before the tracker was lent
        self._kept_rate = 0.0  # of the link to the holder, in bytes per second; 0.0: unknown
        self._images = factory.images(snapshot)
        self._files = OutgoingFiles(resident, factory)
        self._memory = OutgoingMemory(resident, factory, None)
        self._frozen = FrozenCapsule(resident, self._images, devices, no_devices)
        self._dump: WireDump | None = None
        self._turn = threading.RLock()
        self._given_up = self._thawed = self._closed = False
        self._asked = False  # whether a thaw was asked for while the tree was held
        self._timer = ThawTimer(f"{snapshot} of {resident.spec.name}", self.close)

    @property
    def sent(self) -> int:
        """Bytes sent on all lanes."""
        return self._wire.sender.bytes + self._memory.sent

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has succeeded: nothing is left here, and the tracker is back."""
        return self._closed

    @property
    def off_gpus(self) -> bool:
        """Whether device state is off its GPUs, or will be at any moment."""
        return self._frozen.devices is not None and self._dump is not None and not self._thawed

    # ---- the steps -----------------------------------------------------------------------------

    def send_ahead(self, request: SnapshotRequest, asked: float, criu: Criu) -> Moved:
        """Send directories, output and one round of memory while the job trains, for a request that
        came at ``asked`` (monotonic seconds). Then ``criu`` is started, so that it is ready at the
        boundary.

        Raises StepFailed.
        """
        with self._step(SnapshotPhase.PREPARING):
            # If the boundary does not come within ``prepare`` seconds after that, it never does.
            self._timer.within(request.deadline + self._factory.cluster.timeouts.prepare)
            watch, until = Stopwatch(asked), asked + request.deadline
            self._begin_memory(request)
            sender = self._wire.sender
            with watch.phase("files ahead") as lap:
                self._files.send_ahead(sender.send)
                network_lock.prepare_lock(self.resident.sandbox.init, ingress_only=INGRESS_ONLY)
                sender.finish()
                lap.bytes = sender.bytes
            with watch.phase("pre-copy") as lap:
                self._send_memory(request, until, lap)
                self._files.send_output(sender.send)
                freeze_obstacles.wait_unlocked(
                    self.resident.sandbox,
                    self._factory.placement,
                    min(until, time.monotonic() + freeze_obstacles.UNLOCKED_S),
                    self._over,
                )
            self._frozen.tree.start_ahead(criu, self._memory.page_filter(self._images))
            self.phase = SnapshotPhase.AHEAD
            return Moved(self.sent, watch.phases)

    def check_may_lock(self) -> None:
        """Raises StepFailed if :meth:`lock` would. Ask before signals are held back: a late request
        must not hold them back for good."""
        self._need(SnapshotPhase.AHEAD, SnapshotPhase.LOCKED)

    def lock(self, deadline_s: float) -> None:
        """Lock the network. The tasks run on behind the lock, for at most ``deadline_s`` seconds;
        then the snapshot ends. May be repeated while the lock lasts.

        The caller has held signals back (CapsuleTable.hold_signals). They pass again after the
        thaw. Raises StepFailed once the snapshot is over here.
        """
        with self._turn:
            if self._thawed:  # since check_may_lock
                self.resident.still = False
            if self.phase is SnapshotPhase.LOCKED and not self._over():
                return
            with self._step(SnapshotPhase.AHEAD):
                self._lock(deadline_s)
                self.phase = SnapshotPhase.LOCKED
        reach("snapshot.locked")
        self._need(SnapshotPhase.LOCKED)

    def dump(self, criu: Criu, deadline_s: float) -> Frozen:
        """Freeze the tree, and send the rest of its image within ``deadline_s`` seconds; then the
        tree is held frozen. Raises StepFailed, also if the lock was opened since it was closed."""
        with self._step(SnapshotPhase.LOCKED):
            assert self._dump is not None  # lock made it
            dump, watch = self._dump, self._dump.watch
            dump.begin(min(deadline_s, self._timer.left))
            self._need_time()
            with watch.phase("barrier", frozen=True) as lap:
                lap.detail = "until every capsule of the job was locked"
            with watch.phase("check", frozen=True):
                dump.check(self._over)
            dump.dump(criu, "snapshot.dumped", self._need_time)
            self._frozen.tree.check_held()  # else tasks may have run before everything was read
            with watch.phase("manifest", frozen=True):
                dump.send_manifest()
            self.complete = True
            self.phase = SnapshotPhase.DUMPED
            return Frozen(dump.sent, watch.phases)

    def seal(self) -> bytes:
        """Make the digest of a dumped capsule, which stays frozen: it is about to leave this host,
        so what it takes along from carried paths is noted. Raises StepFailed if it does not stay
        frozen, or if the image is not whole. May be repeated."""
        with self._turn:
            with self._step(SnapshotPhase.DUMPED):
                if not self.digest:
                    self._files.remember_taken()
                    self._make_digest()
                if not self.digest:
                    name = self.resident.spec.name
                    raise StepFailed("snapshot", f"the image of {name} is not whole")
            return self.digest

    # ---- its end -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Give the snapshot up: interrupt what is under way. A thread thaws the capsule."""
        self._interrupt()
        self._timer.end()

    def thaw(self) -> None:
        """Let the capsule go on: tasks first, then the network that they expect, then its device
        state. An image that is not whole is given up. May be repeated, also after an error. Raises
        DeviceLost if the capsule had to be ended, because its device state does not come back.

        A thread closes the snapshot afterwards, because the job waits for this method.
        """
        self._go_on(asked=True)

    def _go_on(self, *, asked: bool) -> None:
        self._interrupt()
        with self._turn:
            if self.complete and not self._thawed:
                self._asked |= asked and self._frozen.tree.held()
                self.early = not self._asked
            try:
                if not self._thawed:
                    self.phase = SnapshotPhase.OVER  # whatever fails now, no dump may follow
                    self._let_go()
                    self._thawed = True
            finally:
                self._timer.end()

    def close(self) -> None:
        """Thaw, make the digest, return the tracker, and remove what the snapshot has left here.
        May be repeated, also after an error."""
        self._go_on(asked=False)
        with self._turn:
            if not self._closed:
                if not self.digest:
                    self._make_digest()
                background.end(self.snapshot)
                self._files.close()
                self._memory.close()
                self._return_tracker()
                with contextlib.suppress(Exception):
                    self._wire.sender.close()
                shutil.rmtree(self._images, ignore_errors=True)
                self._closed = True
                self._timer.thawed()

    # ---- parts ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, phase: SnapshotPhase) -> Iterator[None]:
        """One step, in its turn. In another phase than ``phase`` it is refused, and nothing
        changes. An error in the step ends the snapshot."""
        with self._turn:
            self._need(phase)
            try:
                yield
                self._need_time()
            except BaseException:
                self.close()
                raise

    def _need(self, *phases: SnapshotPhase) -> None:
        self._need_time()
        if self.phase not in phases:
            name, phase = self.resident.spec.name, self.phase.value
            raise StepFailed("snapshot", f"{self.snapshot} of {name} cannot do this: it is {phase}")

    def _need_time(self) -> None:
        """Raises StepFailed once the capsule goes on, or will do so at once."""
        if self._over():
            name, host = self.resident.spec.name, self._factory.host
            raise StepFailed(
                "snapshot",
                f"{self.snapshot} is over on {host}, where {name} goes on",
                hint="the job is unharmed, and so is the snapshot before this one",
            )

    def _over(self) -> bool:
        return self._given_up or self._timer.over or self.phase is SnapshotPhase.OVER

    def _interrupt(self) -> None:
        self._given_up = True
        self._memory.cancel()
        self._wire.sender.until = 0.0
        self._memory.give_up()

    def _begin_memory(self, request: SnapshotRequest) -> None:
        lent = self._tracker.lend(request.destination, request.stands, request.least)
        if request.own not in (None, request.stands) and not self._tracker.sends_all:
            self._wire.give_up_copy("this host does not have what its holder has")
        self._generation = request.generation
        run = self._factory.cluster.paths.run
        self._kept_rate = link_rates.rate(run, request.destination)
        self._memory = OutgoingMemory(self.resident, self._factory, self._wire, lent)
        self._need_time()  # what was interrupted before this line were not these lanes
        self._memory.begin_snapshot(self.snapshot)

    def _send_memory(self, request: SnapshotRequest, until: float, lap: Lap) -> None:
        self._memory.send_ahead(until, lap)
        if time.monotonic() > until:  # the round was interrupted: the freeze would send the rest
            raise StepFailed(
                "pre-copy",
                f"the memory of {self.resident.spec.name} did not go to {request.destination}"
                f" within {request.deadline:g} s",
                hint="use a faster link, or raise timeouts.precopy",
            )

    def _limit_silence(self) -> None:
        """The job is paused from now on. An order fails with its snapshot, so an ordered one has
        all the patience of the wire."""
        lanes, limit = self._memory.lanes, float("inf")
        if not self._ordered:
            # These lanes have a rate only if chunks queued before them: not for a small increment.
            rate = (lanes.rate if lanes is not None else 0.0) or self._kept_rate
            streams = self._factory.cluster.wire.streams
            limit = self._tracker.silence.limit(rate, streams + 1)
        self._wire.sender.silence.begin(limit)

    def _lock(self, deadline_s: float) -> None:
        self._timer.within(deadline_s)
        self._limit_silence()
        background.leave(self.snapshot)
        dump = self._dump = WireDump(
            self.resident,
            self._factory.placement,
            self._images,
            self._wire.sender,
            self._files,
            self._memory,
            self._frozen,
        )
        dump.begin(deadline_s)
        name, epoch = self.resident.spec.name, self.resident.epoch
        dump.stop(OutgoingNote(self.snapshot, name, self.gpus, epoch))
        with dump.watch.phase("lock", frozen=True):
            dump.lock()

    def _let_go(self) -> None:
        if self._frozen.devices is None:  # it may have loaded the driver without a use for it
            self._frozen.thaw_tree()
            return
        try:
            self._frozen.thaw()
        except StepFailed as error:
            now, sandbox = time.monotonic(), self.resident.sandbox
            self._off_since = self._off_since or now
            late = now - self._off_since > self._factory.cluster.timeouts.restore
            if late and self._protected and sandbox.alive():  # else it would wait for ever
                log.error("%s of %s ends it: %s", self.snapshot, self.resident.spec.name, error)
                sandboxes.end(sandbox)
            raise

    def _return_tracker(self) -> None:
        """Only once, even if it fails: the next snapshot may have the tracker then."""
        generation, self._generation = self._generation, 0
        if generation:
            silence, most = self._wire.sender.silence, self._wire.sender.to.patience
            if silence.broken or self.complete:
                self._tracker.silence.learn(silence.longest, broken=silence.broken, most=most)
            self._tracker.returned(generation if self.complete else 0)

    def _make_digest(self) -> None:
        if self.complete:
            try:
                self.digest = self._memory.digest()
            except LiveshiftError as error:
                log.error("%s of %s: %s", self.snapshot, self.resident.spec.name, error)
                self.complete = False
