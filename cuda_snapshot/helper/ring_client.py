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
        self._error: LiveshiftError | None = None  # why the helper has ended the copy
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
        """Bytes that may come ahead of ones that are missing."""

    def close(self) -> None:
        """End the copy, complete or not. May be called again."""
        self._channel.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            # If a caller still has a view, Python unmaps the memory with the last view.
            with suppress(BufferError):
                memory.close()

    def _slot(self, number: int, start: int, end: int) -> memoryview:
        self._check_open()
        assert self._memory is not None
        if not (0 <= number < self._ring.slots and 0 <= start <= end <= self._ring.slot_bytes):
            raise LiveshiftError(f"this ring has no bytes {start} to {end} of slot {number}")
        at = number * self._ring.slot_bytes
        return memoryview(self._memory)[at + start : at + end]

    def _check_open(self) -> None:
        if self._memory is None:
            raise self._error or LiveshiftError("this copy of device memory has ended")

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
        if message.error is not None:
            self._error = from_wire(*message.error)
        self.close()
        if self._error is not None:
            raise self._error
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


class _Window:
    """The bytes that one slot takes: its number, their number, and which of them have come."""

    def __init__(self, slot: int, size: int) -> None:
        self.slot, self.size = slot, size
        self.missing = size
        self._came: list[tuple[int, int]] = []  # (first, end), in the order in which they came

    def add(self, first: int, end: int) -> None:
        """Note these bytes; raises LiveshiftError if one of them came before."""
        if any(first < e and f < end for f, e in self._came):
            raise LiveshiftError("bytes of device memory came twice")
        self.missing -= end - first
        if self._came and self._came[-1][1] == first:  # one writer in order: keep one entry
            first, _ = self._came.pop()
        self._came.append((first, end))


class Filler(_RingUser):
    """Writes all bytes of a key's blocks, each once and in any order; any thread may call it.

    The helper takes slots in the order of their bytes. So a slot goes to it once its bytes are all
    there and all earlier slots have gone. Bytes may come ahead of missing ones, but only within the
    ring's :attr:`reach`; further ones are refused, since no slot would get free for them.

    A lock serialises the writers. Python copies under its own lock anyway, and so no thread writes
    into the ring any more when it goes back to the helper.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._free = deque(range(self._ring.slots))
        self._windows: dict[int, _Window] = {}
        """The windows that have some of their bytes, and that the helper does not have yet."""
        self._first = 0
        """The first window that has not gone to the helper."""
        self._missing = self.total
        self._at = 0  # where space() is
        self._turn = threading.RLock()

    def close(self) -> None:
        with self._turn:
            super().close()

    def write_at(self, at: int, data: memoryview) -> None:
        """Write bytes whose first one is byte ``at`` of all. They are copied into the ring before
        this returns.

        Raises LiveshiftError if the copy fails, and for bytes that the blocks do not have, that
        came before, or that are too far ahead; nothing that came before is lost then."""
        if not 0 <= at <= at + len(data) <= self.total:
            raise LiveshiftError(
                f"{len(data)} bytes at {at} are outside of {self.total} bytes of device memory"
            )
        with self._turn:
            self._check_open()  # so that each of several threads raises the helper's error
            while data:
                number, first = divmod(at, self._ring.slot_bytes)
                window = self._window(number)
                size = min(len(data), window.size - first)
                window.add(first, first + size)
                self._slot(window.slot, first, first + size)[:] = data[:size]
                self._came(size)
                at, data = at + size, data[size:]

    def write(self, data: memoryview | bytes) -> None:
        """Write the next bytes, any number, where one thread writes all in order; otherwise as
        :meth:`write_at`."""
        view = memoryview(data).cast("B")
        self.write_at(self._at, view)
        self._at += len(view)

    def space(self) -> memoryview:
        """Memory into which a thread that writes all in order may put the next bytes itself, for
        example from a socket; valid until :meth:`advance`. Raises as :meth:`write_at`."""
        if self._at == self.total:
            raise LiveshiftError(f"all {self.total} bytes of device memory have come")
        with self._turn:
            number, first = divmod(self._at, self._ring.slot_bytes)
            window = self._window(number)
            return self._slot(window.slot, first, window.size)

    def advance(self, size: int) -> None:
        """Says that the caller has put ``size`` bytes into :meth:`space`. Raises as
        :meth:`write_at`."""
        with self._turn:
            number, first = divmod(self._at, self._ring.slot_bytes)
            self._window(number).add(first, first + size)
            self._came(size)
        self._at += size

    def finish(self) -> Figures:
        """Call this after all bytes were written; waits until they are on the GPU.

        Raises LiveshiftError if bytes are missing, or the copy failed."""
        with self._turn:
            if self.figures is None:
                self._check_open()
                self._finish()
            assert self.figures is not None
            return self.figures

    def _finish(self) -> None:
        # Ask the helper in any case: when it has answered, no copy into the blocks runs any more.
        self._send(Finish())
        try:
            while self.figures is None:
                self._take(self._receive())
        except LiveshiftError as error:
            if self._error is not None and self._missing:  # the helper counts only whole slots
                missing = f"{self._missing} of {self.total} bytes of device memory are missing"
                raise LiveshiftError(missing) from error
            raise

    def _window(self, number: int) -> _Window:
        """A window that takes bytes; waits for a slot if it is new."""
        if number < self._first:
            raise LiveshiftError("bytes of device memory came twice")
        if number >= self._first + self._ring.slots:
            raise LiveshiftError(
                f"device memory came further ahead than the {self.reach} bytes of the ring"
            )
        if number not in self._windows:
            # Fewer windows than slots are open, so the helper has a slot and will give it back.
            while not self._free:
                self._take(self._receive())
            size = self._ring.slot_bytes
            size = min(size, self.total - number * size)
            self._windows[number] = _Window(self._free.popleft(), size)
        return self._windows[number]

    def _came(self, size: int) -> None:
        """Count bytes that were written; give the helper all slots whose turn has come."""
        self._missing -= size
        while (window := self._windows.get(self._first)) and not window.missing:
            del self._windows[self._first]
            self._first += 1
            self._send(SlotFilled(window.slot, window.size))

    def _take(self, message: RingMessage) -> None:
        if isinstance(message, TransferEnded):
            self._ended(message)
            if not self.figures:
                raise LiveshiftError("the GPU helper ended the copy without a result")
        elif isinstance(message, Free):
            self._free.append(message.slot)
        else:
            raise LiveshiftError(f"the GPU helper sent {message!r} while memory was copied in")
