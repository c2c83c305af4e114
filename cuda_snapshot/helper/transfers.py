# SPDX-License-Identifier: Apache-2.0
"""The helper's end of a copy through a ring: device memory goes to a client, or comes from it.

Each copy runs in the thread of its connection, and returns when the client has closed that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress

from ... import units
from ...errors import LiveshiftError, NotFound, to_wire
from ...waiting import readable
from .blocks import Figures
from .channel import Channel
from .contexts import Contexts
from .copying import Copies
from .device_memory import DeviceMemory, KeyHolding
from .ring import CopyRing, CopyRings
from .slots import (
    Finish,
    Free,
    RingHere,
    RingMessage,
    SlotFilled,
    TransferEnded,
    receive_message,
    send_message,
)

Copy = Callable[[Channel, KeyHolding, CopyRing, Copies], Figures]


class Transfers:
    """Serves copies. Any thread may use it."""

    def __init__(self, contexts: Contexts, memory: DeviceMemory, rings: CopyRings) -> None:
        self._contexts, self._memory, self._rings = contexts, memory, rings

    def drain(self, channel: Channel, key: str) -> None:
        """Give the client all bytes of a key."""
        self._serve(channel, key, _out)

    def fill(self, channel: Channel, key: str) -> None:
        """Take all bytes of a key from the client."""
        self._serve(channel, key, _in)

    def _serve(self, channel: Channel, key: str, copy: Copy) -> None:
        # A client that has gone has given all slots back, and can be sent no error.
        with suppress(OSError, EOFError), ExitStack() as until_closed:
            try:
                # Let the memory go before the ring, since a client may close late.
                with self._memory.use(key) as holding:
                    figures = self._copy(channel, holding, copy, until_closed)
                ended = TransferEnded(figures, None)
            except (OSError, EOFError):
                raise
            except Exception as error:
                ended = TransferEnded(None, to_wire(error))
            send_message(channel, ended)
            while True:
                receive_message(channel)
        self._rings.unpin_idle(self._memory.gpus())

    def _copy(
        self, channel: Channel, holding: KeyHolding, copy: Copy, until_closed: ExitStack
    ) -> Figures:
        if not holding.pieces:
            raise NotFound(f"the GPU helper holds only contexts for {holding.key}")
        ring = until_closed.enter_context(self._rings.one(holding.pieces[0].gpu))
        with Copies(self._contexts, ring, self._memory.mapped) as copies:
            send_message(channel, RingHere(ring.slots, ring.slot_bytes, holding.size), ring.fd)
            return copy(channel, holding, ring, copies)


class _Waiting:
    """Adds up the time in which the client kept the GPU from copying."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.seconds = 0.0

    def receive(self, channel: Channel, idle: bool) -> RingMessage:
        before = time.monotonic()
        message = receive_message(channel)
        if idle:
            self.seconds += time.monotonic() - before
        return message

    def figures(self, size: int) -> Figures:
        return Figures(size, time.monotonic() - self.begun, self.seconds)


def _out(channel: Channel, holding: KeyHolding, ring: CopyRing, copies: Copies) -> Figures:
    if not holding.complete:
        raise LiveshiftError(f"the device memory of {holding.key} was never filled")
    cursor = copies.over(holding.pieces)
    free = deque(range(ring.slots))
    sizes: dict[int, int] = {}
    clock = _Waiting()
    while cursor.left or copies:
        _check(holding)
        while cursor.left and free:
            slot = free.popleft()
            runs = cursor.next_runs(ring.slot_bytes)
            sizes[slot] = sum(run.size for run in runs)
            copies.start(slot, runs, out=True)
        if copies:
            slot = copies.finish_oldest()
            send_message(channel, SlotFilled(slot, sizes.pop(slot)))
        while readable(0, channel.socket) or (cursor.left and not free and not copies):
            message = clock.receive(channel, idle=not copies)
            if not isinstance(message, Free):
                raise LiveshiftError(f"the client sent {message!r} while memory was copied out")
            free.append(_slot(message.slot, ring, free, sizes))
    return clock.figures(holding.size)


def _in(channel: Channel, holding: KeyHolding, ring: CopyRing, copies: Copies) -> Figures:
    cursor = copies.over(holding.pieces)
    holding.complete = False
    flying: set[int] = set()
    clock = _Waiting()
    while True:
        if copies and not readable(0, channel.socket):
            slot = copies.finish_oldest()
            flying.remove(slot)
            send_message(channel, Free(slot))
            continue
        message = clock.receive(channel, idle=not copies)
        _check(holding)
        if isinstance(message, Finish):
            break
        if not isinstance(message, SlotFilled) or not 0 < message.size <= ring.slot_bytes:
            raise LiveshiftError(f"the client sent {message!r} while memory was copied in")
        if message.size > cursor.left:
            raise LiveshiftError(
                f"more bytes came for {holding.key} than its {units.size(holding.size)} of device"
                " memory"
            )
        copies.start(_slot(message.slot, ring, flying), cursor.next_runs(message.size), out=False)
        flying.add(message.slot)
    while copies:
        copies.finish_oldest()
    if cursor.left:
        raise LiveshiftError(
            f"{cursor.left} of {holding.size} bytes of the device memory of {holding.key} are "
            "missing"
        )
    holding.complete = True
    return clock.figures(holding.size)


def _slot(slot: int, ring: CopyRing, *elsewhere: Container[int]) -> int:
    """The slot's number, checked: the ring has it, and it is in none of ``elsewhere``. Raises
    LiveshiftError."""
    if any(slot in others for others in elsewhere):
        raise LiveshiftError(f"the client gave slot {slot}, which it did not have")
    if not 0 <= slot < ring.slots:
        raise LiveshiftError(f"the client gave slot {slot} of {ring.slots}")
    return slot


def _check(holding: KeyHolding) -> None:
    if holding.dropped:
        raise LiveshiftError(f"the device memory of {holding.key} was dropped during its copy")
