# SPDX-License-Identifier: Apache-2.0
"""Copies between a ring's slots and device memory; several copies run at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from ..driver import CudaError
from .contexts import Contexts
from .device_memory import Piece
from .ring import CopyRing

STREAMS = 4
"""Each GPU has this many streams: while the copy of one slot ends, the next one is already
running."""


@dataclass(frozen=True)
class DeviceRun:
    """Bytes at consecutive addresses on one GPU."""

    gpu: str
    address: int
    size: int


class Cursor:
    """Goes through all bytes of some pieces, in order. ``mapped`` returns the address where a piece
    is mapped; it is called when the piece's turn comes, while earlier pieces are being copied."""

    def __init__(self, pieces: Sequence[Piece], mapped: Callable[[Piece], int]) -> None:
        self._pieces = deque(pieces)
        self._mapped = mapped
        self._at = 0
        self.left = sum(piece.block.size for piece in pieces)
        """Bytes still to come."""

    def next_runs(self, size: int) -> list[DeviceRun]:
        """The next ``size`` bytes, or fewer if no more are left. Raises CudaError."""
        runs = []
        while size > 0 and self._pieces:
            piece = self._pieces[0]
            here = min(size, piece.block.size - self._at)
            runs.append(DeviceRun(piece.gpu, self._mapped(piece) + self._at, here))
            size -= here
            self.left -= here
            self._at += here
            if self._at == piece.block.size:
                self._pieces.popleft()
                self._at = 0
        return runs


class Copies:
    """Copies under way on one ring; one thread uses it. ``mapped`` is the same as Cursor's."""

    def __init__(self, contexts: Contexts, ring: CopyRing, mapped: Callable[[Piece], int]) -> None:
        self._mapped = mapped
        self._contexts, self._cuda = contexts, contexts.cuda
        self._ring = ring
        self._streams: dict[str, list[int]] = {}
        self._events: dict[tuple[str, int], int] = {}
        self._flying: deque[tuple[int, list[tuple[str, int]]]] = deque()

    def __len__(self) -> int:
        """How many slots have copies that :meth:`finish_oldest` has not waited for."""
        return len(self._flying)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *how: object) -> None:
        """Wait for all copies that still run, since another copy will use the slots next."""
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
        """A cursor over the pieces, from which the caller takes the runs in order."""
        return Cursor(pieces, self._mapped)

    def start(self, slot: int, runs: Sequence[DeviceRun], *, out: bool) -> None:
        """Start a copy between a slot, from its beginning, and the runs. ``out``: to the slot."""
        at = self._ring.slot(slot)
        used: list[tuple[str, int]] = []
        # Note the slot first: if the second of its runs fails, the copy of the first may run.
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
                # If a slot has several runs on a GPU, the last record is after all of them.
                self._cuda.record(self._events[gpu, slot], stream)
            if (gpu, slot) not in used:
                used.append((gpu, slot))

    def finish_oldest(self) -> int:
        """Wait for the copies of the slot that was started first; returns its number."""
        slot, used = self._flying.popleft()
        for gpu, _ in used:
            with self._contexts.current(gpu):
                self._cuda.wait_event(self._events[gpu, slot])
        return slot

    def _stream(self, gpu: str, slot: int) -> int:
        """The stream for a slot on this GPU, whose context must be current."""
        if gpu not in self._streams:
            self._contexts.retain(gpu)
            self._streams[gpu] = []
        streams = self._streams[gpu]
        while len(streams) < STREAMS:
            streams.append(self._cuda.stream())
        return streams[slot % STREAMS]
