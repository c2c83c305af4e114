# SPDX-License-Identifier: Apache-2.0
"""Copies between a ring's slots and device memory, several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType

from ..driver import CudaError
from .contexts import Contexts
from .device_memory import Piece
from .ring import Ring

STREAMS = 4
"""For each GPU: while one slot's copy ends the next is running."""


@dataclass(frozen=True)
class Run:
    """Bytes that lie together on one GPU."""

    gpu: str
    address: int
    size: int


class Cursor:
    """Goes through all bytes of some pieces, in order. ``mapped`` gives the address where a piece
    is mapped: it is called when its turn comes, while earlier ones are being copied."""

    def __init__(self, pieces: Sequence[Piece], mapped: Callable[[Piece], int]) -> None:
        self._pieces = deque(pieces)
        self._mapped = mapped
        self._at = 0
        self.left = sum(piece.block.size for piece in pieces)
        """Bytes still to come."""

    def take(self, size: int) -> list[Run]:
        """The next bytes, ``size`` of them or as many as there are. Raises CudaError."""
        runs = []
        while size > 0 and self._pieces:
            piece = self._pieces[0]
            here = min(size, piece.block.size - self._at)
            runs.append(Run(piece.gpu, self._mapped(piece) + self._at, here))
            size -= here
            self.left -= here
            self._at += here
            if self._at == piece.block.size:
                self._pieces.popleft()
                self._at = 0
        return runs


class Copies:
    """Copies under way on one ring; used by one thread. ``mapped`` as Cursor's."""

    def __init__(self, contexts: Contexts, ring: Ring, mapped: Callable[[Piece], int]) -> None:
        self._mapped = mapped
        self._contexts, self._cuda = contexts, contexts.cuda
        self._ring = ring
        self._streams: dict[str, list[int]] = {}
        self._events: dict[tuple[str, int], int] = {}
        self._flying: deque[tuple[int, list[tuple[str, int]]]] = deque()

    def __len__(self) -> int:
        """Slots whose copies were not yet waited for."""
        return len(self._flying)

    def __enter__(self) -> Copies:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for all that still runs: the slots are somebody else's next."""
        for gpu, streams in self._streams.items():
            with suppress(CudaError), self._contexts.current(gpu):
                for stream in streams:
                    with suppress(CudaError):
                        self._cuda.wait_stream(stream)
                    with suppress(CudaError):
                        self._cuda.end_stream(stream)
        for (gpu, _), event in self._events.items():
            with suppress(CudaError), self._contexts.current(gpu):
                self._cuda.end_event(event)
        for gpu in self._streams:
            with suppress(CudaError):
                self._contexts.let_go(gpu)

    def over(self, pieces: Sequence[Piece]) -> Cursor:
        """To take the runs from, in order."""
        return Cursor(pieces, self._mapped)

    def start(self, slot: int, runs: Sequence[Run], *, out: bool) -> None:
        """Copy between a slot, from its beginning, and the runs."""
        at = self._ring.slot(slot)
        used: list[tuple[str, int]] = []
        # Noted first: where the second of its runs fails the first may be running.
        self._flying.append((slot, used))
        for gpu, together in groupby(runs, lambda run: run.gpu):
            with self._contexts.current(gpu):
                stream = self._stream(gpu, slot)
                for run in together:
                    if out:
                        self._cuda.copy_out(at, run.address, run.size, stream)
                    else:
                        self._cuda.copy_in(run.address, at, run.size, stream)
                    at += run.size
                if (gpu, slot) not in self._events:
                    self._events[gpu, slot] = self._cuda.event()
                # Where the slot comes back to a GPU, this is after all that it had there before.
                self._cuda.record(self._events[gpu, slot], stream)
            if (gpu, slot) not in used:
                used.append((gpu, slot))

    def finish_oldest(self) -> int:
        """Wait for the slot that was started first: its number."""
        slot, used = self._flying.popleft()
        for gpu, _ in used:
            with self._contexts.current(gpu):
                self._cuda.wait_event(self._events[gpu, slot])
        return slot

    def _stream(self, gpu: str, slot: int) -> int:
        """Of the current context, which is that GPU's."""
        if gpu not in self._streams:
            self._contexts.retain(gpu)
            self._streams[gpu] = []
        streams = self._streams[gpu]
        while len(streams) < STREAMS:
            streams.append(self._cuda.stream())
        return streams[slot % STREAMS]
