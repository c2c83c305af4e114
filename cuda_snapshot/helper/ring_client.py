# SPDX-License-Identifier: Apache-2.0
"""The agent's end of a copy through a ring: device memory as a stream of bytes.

Each copy has a connection of its own. When the connection ends, the copy ends: the slots go back,
and the helper keeps the key's memory. Errors of the helper are raised as they are; if the helper
has gone, Unreachable is raised.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from ...errors import LiveshiftError, Unreachable, from_wire
from .blocks import Figures
from .channel import Channel
from .connection import Closing, contact
from .ring import PATIENCE_S
from .slots import (
    Finish,
    Free,
    RingMessage,
    SlotFilled,
    TransferEnded,
    receive_message,
    receive_ring,
    send_message,
)

STALL_S = 120.0
"""If the helper sends nothing for this many seconds during a copy, a GPU hangs."""

COPY = "a copy of device memory"


class _RingUser(Closing):
    """A connection for a copy, and the ring that came with it, mapped in this process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.figures: Figures | None = None
        """The copy's size and times; None until the copy is complete."""
        try:
            with contact(COPY):
                channel.socket.settimeout(PATIENCE_S + STALL_S)  # the helper may wait for a ring
                self._ring, fd = receive_ring(channel)
                channel.socket.settimeout(STALL_S)
            try:
                size = self._ring.slots * self._ring.slot_bytes
                self._memory: mmap.mmap | None = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except BaseException:
            channel.close()
            raise
        self.total = self._ring.total
        """Bytes of all the key's blocks."""
        self.reach = (self._ring.slots - 1) * self._ring.slot_bytes
        """Bytes that may be under way at once, out of order."""

    def close(self) -> None:
        """End the copy, complete or not. May be called again."""
        self._channel.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            # If a caller still has a view, Python unmaps the memory with the last view.
            with suppress(BufferError):
                memory.close()

    def _slot(self, number: int, start: int, end: int) -> memoryview:
        if self._memory is None:
            raise LiveshiftError("this copy of device memory has ended")
        if not (0 <= number < self._ring.slots and 0 <= start <= end <= self._ring.slot_bytes):
            raise LiveshiftError(f"this ring has no bytes {start} to {end} of slot {number}")
        at = number * self._ring.slot_bytes
        return memoryview(self._memory)[at + start : at + end]

    def _receive(self) -> RingMessage:
        with contact(COPY):
            return receive_message(self._channel)

    def _send(self, message: RingMessage) -> None:
        try:
            with contact(COPY):
                send_message(self._channel, message)
        except Unreachable:
            # The helper may have sent the reason before it closed the connection.
            with suppress(Unreachable):
                while not isinstance(ended := self._receive(), TransferEnded):
                    pass
                self._ended(ended)
            raise

    def _ended(self, message: TransferEnded) -> None:
        self.close()
        if message.error is not None:
            raise from_wire(*message.error)
        self.figures = message.figures


class Drain(_RingUser, Iterator[memoryview]):
    """Iterates over all bytes of a key's blocks, in order. A view is valid until the next step, or
    until the copy is closed. Raises LiveshiftError if the copy fails; it ends only after all
    bytes."""

    _last: int | None = None
    _seen = 0

    def __next__(self) -> memoryview:
        if self.figures is not None:
            raise StopIteration
        try:
            if self._last is not None:
                self._send(Free(self._last))
                self._last = None
            message = self._receive()
            if isinstance(message, TransferEnded):
                self._ended(message)
                if self._seen != self.total:
                    raise LiveshiftError(
                        f"the GPU helper gave {self._seen} of {self.total} bytes of device memory"
                    )
                raise StopIteration
            if not isinstance(message, SlotFilled):
                raise LiveshiftError(f"the GPU helper sent {message!r} while memory was copied out")
            self._last = message.slot
            self._seen += message.size
            return self._slot(message.slot, 0, message.size)
        except BaseException:
            self.close()
            raise


class Filler(_RingUser):
    """Writes all bytes of a key's blocks, in any order, from several threads.

    The bytes of a slot go to the GPU once they are all there, and those of all earlier slots have
    gone. All bytes that are under way must lie within the ring's :attr:`reach`.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._free = deque(range(self._ring.slots))
        self._open: dict[int, tuple[int, int]] = {}
        """By window of a slot's size: its slot, and how many of its bytes are missing."""
        self._next = 0
        """The first window that has not gone to the GPU."""
        self._written = 0  # by write()
        self._turn = threading.Lock()

    def write(self, data: memoryview | bytes) -> None:
        """Write the next bytes, where one thread writes all in their order; else as
        :meth:`write_at`."""
        view = memoryview(data).cast("B")
        self.write_at(self._written, view)
        self._written += len(view)

    def write_at(self, at: int, data: memoryview) -> None:
        """Write bytes whose first one is byte ``at`` of all. They are copied into the ring before
        this returns. Raises LiveshiftError if the copy fails, or if there are no such bytes."""
        if at < 0 or at + len(data) > self.total:
            raise LiveshiftError(
                f"{len(data)} bytes at {at} are outside of {self.total} bytes of device memory"
            )
        size = self._ring.slot_bytes
        while data:
            window, start = divmod(at, size)
            part = min(size - start, len(data))
            with self._turn:
                slot = self._slot_of(window)
                space = self._slot(slot, start, start + part)
            space[:] = data[:part]
            space.release()
            with self._turn:
                self._wrote(window, part)
            at, data = at + part, data[part:]

    def finish(self) -> Figures:
        """Call this after all bytes were written; waits until they are on the GPU.

        Raises LiveshiftError if bytes are missing, or the copy failed."""
        with self._turn:
            if self.figures is None:
                self._send(Finish())
                while self.figures is None:
                    self._take(self._receive())
            return self.figures

    def _slot_of(self, window: int) -> int:
        if window < self._next:
            raise LiveshiftError("bytes of device memory came twice")
        if window not in self._open:
            if window >= self._next + self._ring.slots:  # else earlier bytes would wait for us
                raise LiveshiftError(
                    f"device memory came further ahead than the {self.reach} bytes of the ring"
                )
            while not self._free:
                self._take(self._receive())
            size = self._ring.slot_bytes
            missing = min(size, self.total - window * size)
            self._open[window] = self._free.popleft(), missing
        return self._open[window][0]

    def _wrote(self, window: int, size: int) -> None:
        slot, missing = self._open[window]
        self._open[window] = slot, missing - size
        while self._next in self._open and self._open[self._next][1] <= 0:
            slot, _ = self._open.pop(self._next)
            whole = self._ring.slot_bytes
            self._send(SlotFilled(slot, min(whole, self.total - self._next * whole)))
            self._next += 1

    def _take(self, message: RingMessage) -> None:
        if isinstance(message, TransferEnded):
            self._ended(message)
            if not self.figures:
                raise LiveshiftError("the GPU helper ended the copy without a result")
        elif isinstance(message, Free):
            self._free.append(message.slot)
        else:
            raise LiveshiftError(f"the GPU helper sent {message!r} while memory was copied in")
