# SPDX-License-Identifier: Apache-2.0
"""Copies between a ring's slots and device memory, several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    """Goes through all bytes of some pieces, in order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = deque(pieces)
        self._at = 0
        self.left = sum(piece.block.size for piece in pieces)
        """Bytes still to come."""

    def take(self, size: int) -> list[Run]:
        """The next bytes, ``size`` of them or as many as there are."""
        runs = []
        while size > 0 and self._pieces:
            piece = self._pieces[0]
            here = min(size, piece.block.size - self._at)
            runs.append(Run(piece.gpu, piece.address + self._at, here))
            size -= here
            self.left -= here
            self._at += here
            if self._at == piece.block.size:
                self._pieces.popleft()
                self._at = 0
        return runs


class Copies:
    """Copies under way on one ring; used by one thread, which gets the GPUs' contexts current."""

    def __init__(self, contexts: Contexts, ring: Ring) -> None:
        self._contexts, self._cuda = contexts, contexts.cuda
        self._ring = ring
        self._current = ""
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
        tb: TracebackType | None,
    ) -> None:
        """Waits for all that still runs: the slots are somebody else's next."""
        for gpu, streams in self._streams.items():
            with suppress(CudaError):
                self._go_to(gpu)
            for stream in streams:
                with suppress(CudaError):
                    self._cuda.wait_stream(stream)
                with suppress(CudaError):
                    self._cuda.end_stream(stream)
        for event in self._events.values():
            with suppress(CudaError):
                self._cuda.end_event(event)
        with suppress(CudaError):
            self._cuda.make_current(0)
        for gpu in self._streams:
            with suppress(CudaError):
                self._contexts.let_go(gpu)

    def start(self, slot: int, runs: Sequence[Run], *, out: bool) -> None:
        """Copy between a slot, from its beginning, and the runs."""
        at = self._ring.slot(slot)
        used: list[tuple[str, int]] = []
        # Noted first: where the second of its runs fails the first may be running.
        self._flying.append((slot, used))
        for run in runs:
            stream = self._stream(run.gpu, slot)
            if out:
                self._cuda.copy_out(at, run.address, run.size, stream)
            else:
                self._cuda.copy_in(run.address, at, run.size, stream)
            at += run.size
            if (run.gpu, slot) not in used:
                used.append((run.gpu, slot))
        for gpu, _ in used:
            self._cuda.record(self._event(gpu, slot), self._stream(gpu, slot))

    def finish_oldest(self) -> int:
        """Wait for the slot that was started first: its number."""
        slot, used = self._flying.popleft()
        for gpu, _ in used:
            self._cuda.wait_event(self._event(gpu, slot))
        return slot

    def _go_to(self, gpu: str) -> None:
        if self._current != gpu:
            # Retained by the streams' entry below; this only asks for the number.
            context = self._contexts.retain(gpu)
            self._contexts.let_go(gpu)
            self._cuda.make_current(context)
            self._current = gpu

    def _stream(self, gpu: str, slot: int) -> int:
        if gpu not in self._streams:
            self._contexts.retain(gpu)
            self._streams[gpu] = []
        self._go_to(gpu)
        streams = self._streams[gpu]
        while len(streams) < STREAMS:
            streams.append(self._cuda.stream())
        return streams[slot % STREAMS]

    def _event(self, gpu: str, slot: int) -> int:
        self._go_to(gpu)
        if (gpu, slot) not in self._events:
            self._events[gpu, slot] = self._cuda.event()
        return self._events[gpu, slot]
