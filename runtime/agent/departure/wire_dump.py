# SPDX-License-Identifier: Apache-2.0
"""One freeze of a capsule: its image goes over the wire while CRIU holds the tree.

A move freezes a capsule that leaves this host, and a snapshot freezes one that goes on here. Both
dump it in the same way. Only a move promises to hold the tree, before it sends the manifest
(outgoing_migration.py).

Order: ``begin`` sets the deadline. ``stop`` ends the rounds and takes the device state off the
GPUs. ``lock`` closes the network. ``check`` looks for what CRIU cannot dump. ``dump`` freezes the
tree and sends all but the manifest. ``send_manifest`` completes the image. Tasks run until
``dump``, so a caller that waits between ``lock`` and ``check`` loses nothing by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ....criu_glue.capsule.mounts import Placement
from ....criu_glue.criu.tool import Criu
from ....criu_glue.survey.epoll_sets import EpollEntry
from ....errors import StepFailed
from ...daemon.faultpoints import reach
from ...model.stopwatch import Stopwatch
from ...wire import Sender
from ...wire.small_images import SmallImagePacker
from ..gpu.device_memory import Pump
from ..host.running_capsule import RunningCapsule
from . import freeze_obstacles
from .final_dirty_set import FinalDirtySet
from .frozen_capsule import FrozenCapsule
from .outgoing_files import OutgoingFiles, sent_of_files
from .outgoing_memory import OutgoingMemory
from .outgoing_note import OutgoingNote, write_note


class WireDump:
    """One freeze of ``resident``. ``images``: the directory for the note and for CRIU's hooks.

    ``watch`` measures the phases from now on. Every method blocks. None of them thaws: after an
    error the caller does that (FrozenCapsule.thaw).
    """

    def __init__(
        self,
        resident: RunningCapsule,
        placement: Placement,
        images: Path,
        wire: Sender,
        files: OutgoingFiles,
        memory: OutgoingMemory,
        frozen: FrozenCapsule,
    ) -> None:
        self.watch = Stopwatch()
        self._resident = resident
        self._placement = placement
        self._images = images
        self._wire = wire
        self._files = files
        self._memory = memory
        self._frozen = frozen
        self._deadline_s = 0.0
        self._before = 0  # bytes that were sent before the rounds had ended
        self._epoll: Sequence[EpollEntry] = ()
        self._removed: dict[str, list[str]] = {}

    @property
    def sent(self) -> int:
        """Bytes sent on all lanes since :meth:`stop`."""
        return self._wire.bytes + self._memory.sent - self._before

    def begin(self, deadline_s: float) -> None:
        """From now on the other host must have everything within ``deadline_s`` seconds. May be
        called again."""
        self._deadline_s = deadline_s
        self._wire.until = time.monotonic() + deadline_s

    def stop(self, note: OutgoingNote) -> None:
        """End the rounds, and take the device state off the GPUs. The tasks run on, but not those
        that use CUDA. ``note`` is there before, so a restarted agent thaws the capsule."""
        self._memory.stop_rounds(self.watch)
        self._before = self._wire.bytes + self._memory.sent
        self._images.mkdir(parents=True, exist_ok=True)
        write_note(self._images, note)
        if (devices := self._frozen.devices) is not None:
            devices.save(self.watch)

    def lock(self) -> None:
        """Lock the capsule's network; the tasks run on. Raises StepFailed if no time is left, and
        LiveshiftError if the network cannot be locked."""
        self._left()
        self._frozen.lock()

    def check(self, given_up: Callable[[], bool]) -> None:
        """Raise StepFailed for what has appeared since the pre-copy and cannot be dumped. It waits
        a short time for the end of file locks, but not once ``given_up`` returns True."""
        self._epoll = freeze_obstacles.check_before_dump(
            self._resident.sandbox, self._placement, given_up
        )

    def dump(self, criu: Criu, point: str, look: Callable[[], None] = lambda: None) -> None:
        """Freeze the tree, and send all of its image but the manifest. Returns when the other host
        has that; then the tree is held frozen.

        ``point``: the fault point at which CRIU holds the tree. ``look`` is called while CRIU
        works, and may raise. After an error no thread of the dump goes on.
        """
        left, final_set = self._left(), None
        pump = Pump(self._frozen.devices, self._wire, self._memory.lanes)
        try:
            final_set = self._memory.send_final_set(self._images, self._wire.until)
            with self.watch.phase("dump", frozen=True) as lap:
                lap.bytes = self._dump_tree(criu, left, final_set, look)
                freeze_obstacles.check_after_dump(self._resident.sandbox)
            reach(point)
            self._removed = self._send_files()
            if final_set is not None:
                with self.watch.phase("memory", frozen=True) as lap:
                    lap.bytes = final_set.finish().sent_bytes
                    lap.detail = final_set.describe()
            if pump.bytes:
                with self.watch.phase("gpu memory", frozen=True) as lap:
                    lap.bytes = pump.finish()
                    lap.detail = pump.describe()
        finally:
            pump.stop()
            if final_set is not None:
                final_set.stop()
        with self.watch.phase("ship", frozen=True) as lap:
            self._wire.finish()
            lap.detail = "the rest of the image, on its way"

    def send_manifest(self) -> None:
        """Complete the image. It may be complete even after an error, because the answer may have
        been lost."""
        size, pipes = self.sent, self._resident.sandbox.pipes()
        lanes, epoll = self._memory.end_streams(), self._frozen.tree.taken_out()
        name, removed, files = self._resident.spec.name, self._removed, self._files
        self._wire.send_manifest(
            name, size, pipes, removed, lanes, epoll, files.shared, files.written
        )
        self._wire.finish()

    def _left(self) -> float:
        left = self._wire.until - time.monotonic()
        if left <= 0:
            raise StepFailed("freeze", f"the dump could not begin within {self._deadline_s:g} s")
        return left

    def _dump_tree(
        self,
        criu: Criu,
        deadline_s: float,
        final_set: FinalDirtySet | None,
        look: Callable[[], None],
    ) -> int:
        """Dump the tree into the wire; return the bytes of CRIU's images."""

        def check() -> None:
            look()
            if final_set is not None:
                final_set.check()

        packer = SmallImagePacker(self._wire.send)
        page_filter = final_set.page_filter if final_set is not None else None
        self._frozen.tree.dump(criu, packer, deadline_s, page_filter, check, self._epoll)
        packer.finish()
        return self._frozen.tree.image_bytes

    def _send_files(self) -> dict[str, list[str]]:
        with self.watch.phase("files", frozen=True) as lap:
            before = sent_of_files(self._wire.streams)
            removed = self._files.send_rest(self._wire.send)
            lap.bytes = sent_of_files(self._wire.streams) - before
        return removed
