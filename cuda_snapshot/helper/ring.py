# SPDX-License-Identifier: Apache-2.0
"""Rings of pinned slots: the only host memory through which the helper copies device memory.

A ring is a memfd that the client maps, too, so the two processes never copy a slot's bytes between
them. The helper keeps its rings for the next move, pinned only while it has a context on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ... import units
from ...errors import LiveshiftError
from ..driver import CudaError
from .contexts import Contexts

SLOT_BYTES = 16 << 20
"""A slot has this many bytes: enough that a copy's fixed costs, some ten µs here and at the client,
do not matter."""
SLOTS = 16
RINGS = 2
"""The helper makes at most this many rings, which limits its host memory."""
PATIENCE_S = 600.0
"""A copy waits at most this many seconds until another copy gives its ring back."""
SIZES = "LIVESHIFT_GPU_RING"
"""This variable in the helper's environment sets other sizes for measurements, such as
"16x16777216"."""


def sizes() -> tuple[int, int]:
    """The number of slots and the bytes of one: from the environment, or the defaults. Raises
    LiveshiftError if the variable is wrong."""
    given = os.environ.get(SIZES)
    if not given:
        return SLOTS, SLOT_BYTES
    slots, _, slot_bytes = given.partition("x")
    try:
        chosen = int(slots), int(slot_bytes)
    except ValueError:
        chosen = 0, 0
    # Two slots at least: while the client has one, the GPU fills the other.
    if chosen[0] < 2 or chosen[1] < mmap.PAGESIZE or chosen[1] % mmap.PAGESIZE:
        raise LiveshiftError(f"{SIZES} is {given!r}, but must be SLOTSxBYTES in whole pages")
    return chosen


class Busy(LiveshiftError):
    """Other copies use all rings."""


class CopyRing:
    """``slots`` × ``slot_bytes`` of shared memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.fd = os.memfd_create("liveshift-gpu-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, slots * slot_bytes)
            self._memory = mmap.mmap(self.fd, slots * slot_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pinned_on: str | None = None
        """The GPU whose context pins the ring, and which the ring retains; None: not pinned."""

    def slot(self, number: int) -> int:
        """The address of a slot in this process."""
        return self._start + number * self.slot_bytes

    def pin(self, contexts: Contexts, gpu: str) -> None:
        """Pin the ring for all GPUs, unless it is pinned. The ring retains the context of ``gpu``
        until :meth:`unpin`."""
        if self.pinned_on is not None:
            return
        contexts.retain(gpu)
        try:
            with contexts.current(gpu):
                contexts.cuda.pin(self._start, self.slots * self.slot_bytes)
        except BaseException:
            contexts.let_go(gpu)
            raise
        self.pinned_on = gpu

    def unpin(self, contexts: Contexts) -> None:
        """Undo :meth:`pin`; copies must have ended."""
        if self.pinned_on is None:
            return
        gpu, self.pinned_on = self.pinned_on, None
        with contexts.current(gpu), suppress(CudaError):
            contexts.cuda.unpin(self._start)
        contexts.let_go(gpu)


class CopyRings:
    """All rings; each copy has one of its own. Any thread may use this."""

    def __init__(self, contexts: Contexts, slots: int, slot_bytes: int):
        self._contexts = contexts
        self._slots, self._slot_bytes = slots, slot_bytes
        self._change = threading.Condition()
        self._idle: list[CopyRing] = []
        self._made = 0

    @contextmanager
    def one(self, gpu: str, patience_s: float = PATIENCE_S) -> Iterator[CopyRing]:
        """A pinned ring while the with block runs. Waits for one; raises Busy if none gets free
        within ``patience_s``."""
        ring = self._take(patience_s)
        try:
            ring.pin(self._contexts, gpu)
            yield ring
        finally:
            with self._change:
                self._idle.append(ring)
                self._change.notify()

    def _take(self, patience_s: float) -> CopyRing:
        with self._change:
            if not self._change.wait_for(lambda: self._idle or self._made < RINGS, patience_s):
                raise Busy(
                    f"{RINGS} other copies of device memory on this host did not end "
                    f"within {patience_s:g} s"
                )
            if self._idle:  # a pinned one first: pinning takes a while
                self._idle.sort(key=lambda ring: ring.pinned_on is not None)
                return self._idle.pop()
            self._made += 1
        try:
            return CopyRing(self._slots, self._slot_bytes)
        except BaseException as error:
            with self._change:
                self._made -= 1
                self._change.notify()
            if isinstance(error, OSError):
                raise LiveshiftError(
                    f"{self._slots} slots of {units.size(self._slot_bytes)} cannot be made: {error}"
                ) from error
            raise

    def unpin_idle(self, keep: set[str]) -> None:
        """Unpin the rings that no copy uses, except those pinned on GPUs of ``keep``."""
        with self._change:
            for ring in self._idle:
                if ring.pinned_on not in keep:
                    ring.unpin(self._contexts)
