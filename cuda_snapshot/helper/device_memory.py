# SPDX-License-Identifier: Apache-2.0
"""Physical device memory that the helper holds for processes that move, by key.

A process gave the memory up (the helper imported it from a descriptor), or the helper created it
for a process that will come. The helper maps a block only when it copies it, since each mapping
takes the driver some time; no other process knows these addresses. A key's memory stays until an
agent drops it: it may be the only copy of a rank's state, and the helper can't know.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from ... import units
from ...errors import LiveshiftError, NotFound, Refused
from ..cuda import Cuda
from ..driver import CudaError, CUresult
from .blocks import Block
from .contexts import Contexts


@dataclass
class Piece:
    """One block's physical memory."""

    block: Block
    gpu: str
    """The GPU where the memory is now; ``block.gpu`` is what the block's owner said."""
    handle: int
    descriptor: int | None
    """The descriptor by which the memory came. We keep it, since a driver may refuse to export
    imported memory again."""
    address: int | None = None
    """The address at which this process has mapped the memory; None if it has not."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the memory is being mapped, since two copies of a key may run at once."""


@dataclass(eq=False)
class KeyHolding:
    """The memory that the helper holds under one key."""

    key: str
    pieces: list[Piece] = field(default_factory=list)
    gpus: set[str] = field(default_factory=set)
    """The GPUs whose contexts the helper retains for this key."""
    complete: bool = True
    """Whether all bytes are there: false between create and the end of a fill."""
    users: int = 0
    """How many copies and calls use the memory. After a drop, the last user frees it."""
    dropped: bool = False

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(piece.block.size for piece in self.pieces)


class DeviceMemory:
    """All holdings. Any thread may use it, but only one thread at a time may set up a key."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._cuda: Cuda = contexts.cuda
        self._lock = threading.Lock()
        self._holdings: dict[str, KeyHolding] = {}

    def held(self) -> dict[str, int]:
        """Bytes by key; 0 for a key that has only contexts."""
        with self._lock:
            return {key: holding.size for key, holding in self._holdings.items()}

    def gpus(self) -> set[str]:
        """The GPUs on which the helper holds memory or contexts."""
        with self._lock:
            return {gpu for holding in self._holdings.values() for gpu in holding.gpus}

    @contextmanager
    def use(self, key: str) -> Iterator[KeyHolding]:
        """A key's memory; it stays while the with block runs, even if it is dropped. Raises
        NotFound."""
        with self._lock:
            holding = self._holdings.get(key)
            if holding is None:
                raise NotFound(f"the GPU helper holds no device memory for {key}")
            holding.users += 1
        try:
            yield holding
        finally:
            self._leave(holding)

    def warm(self, key: str, gpus: Sequence[str]) -> None:
        """Keep contexts on the GPUs until the key is dropped, since making one takes part of a
        second. Raises NotFound, and LiveshiftError if a GPU has no room for a context."""
        with self._lock:
            holding = self._holdings.setdefault(key, KeyHolding(key))
            holding.users += 1
        try:
            for gpu in gpus:
                self._settle_on(holding, gpu)
        finally:
            self._leave(holding)

    def create(self, key: str, blocks: Sequence[Block]) -> None:
        """Make memory for the blocks, each on its GPU; on an error nothing of it stays.

        Raises Refused if the key has memory, NotFound, and LiveshiftError if a GPU is full."""
        with self._building(key, complete=not blocks) as holding:
            for block in blocks:
                self._settle_on(holding, block.gpu)
                holding.pieces.append(self._created(block, block.gpu))

    def take_over(self, key: str, given: Iterator[tuple[Block, int]]) -> None:
        """Take memory over by descriptors, which the helper must close from then on. Raises as
        :meth:`create`."""
        with self._building(key, complete=True) as holding:
            for block, descriptor in given:
                with ExitStack() as undo:
                    undo.callback(os.close, descriptor)
                    self._settle_on(holding, block.gpu)
                    with self._contexts.current(block.gpu):
                        handle = self._cuda.import_descriptor(descriptor)
                    holding.pieces.append(Piece(block, block.gpu, handle, descriptor))
                    undo.pop_all()

    def mapped(self, piece: Piece) -> int:
        """The address of a piece in this process; maps the piece if it is not mapped."""
        with piece.lock:
            if piece.address is None:
                with self._contexts.current(piece.gpu):
                    device = self._contexts.ordinal(piece.gpu)
                    piece.address = self._cuda.map(device, piece.handle, piece.block.size)
            return piece.address

    def bring_to(self, holding: KeyHolding, piece: Piece, gpu: str) -> None:
        """Bring a piece's memory to that GPU: copy it if it is on another GPU of this host."""
        if piece.gpu == gpu:
            return
        self._settle_on(holding, gpu)
        fresh = self._created(piece.block, gpu)
        try:
            there, here = self.mapped(piece), self.mapped(fresh)
            with self._contexts.current(piece.gpu) as source, self._contexts.current(gpu) as target:
                stream = self._cuda.stream()
                try:
                    size = piece.block.size
                    self._cuda.copy_across(here, target, there, source, size, stream)
                    self._cuda.wait_stream(stream)
                finally:
                    self._cuda.end_stream(stream)
        except BaseException:
            self._free_piece(fresh)
            raise
        self._free_piece(piece)
        piece.gpu, piece.handle = fresh.gpu, fresh.handle
        piece.address, piece.descriptor = fresh.address, fresh.descriptor

    @contextmanager
    def descriptor(self, piece: Piece) -> Iterator[int]:
        """A file descriptor of the piece's memory, valid while the with block runs."""
        if piece.descriptor is not None:
            yield piece.descriptor
            return
        with self._contexts.current(piece.gpu):
            descriptor = self._cuda.descriptor_of(piece.handle)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def drop(self, key: str) -> None:
        """Free a key's memory, if there is any. A copy under way ends with an error, and the memory
        is freed with the end of that copy."""
        with self._lock:
            holding = self._holdings.pop(key, None)
            if holding is None:
                return
            holding.dropped = True
            idle = holding.users == 0
        if idle:
            self._free(holding)

    # ---- making and freeing

    def _leave(self, holding: KeyHolding) -> None:
        with self._lock:
            holding.users -= 1
            last = holding.dropped and holding.users == 0
        if last:
            self._free(holding)

    @contextmanager
    def _building(self, key: str, complete: bool) -> Iterator[KeyHolding]:
        """A key's holding, into which the caller puts pieces. On an error the pieces are freed and
        the holding is as before."""
        with self._lock:
            holding = self._holdings.setdefault(key, KeyHolding(key))
            if holding.pieces or holding.users:
                raise Refused(
                    f"the GPU helper holds {units.size(holding.size)} of device memory for {key}"
                    " already"
                )
            holding.users += 1
            before = frozenset(holding.gpus)
        try:
            yield holding
            holding.complete = complete
        except BaseException:
            self._free(holding, before)
            with self._lock:
                if not before and self._holdings.get(key) is holding:
                    del self._holdings[key]
            raise
        finally:
            self._leave(holding)

    def _settle_on(self, holding: KeyHolding, gpu: str) -> None:
        if gpu not in holding.gpus:
            self._contexts.retain(gpu)
            holding.gpus.add(gpu)

    def _created(self, block: Block, gpu: str) -> Piece:
        with self._contexts.current(gpu):
            device = self._contexts.ordinal(gpu)
            try:
                handle = self._cuda.create(device, block.size)
            except CudaError as error:
                if error.result != CUresult.OUT_OF_MEMORY:
                    raise
                free, total = self._cuda.free_and_total()
                raise LiveshiftError(
                    f"{gpu} has no room for {units.size(block.size)} more of device memory: "
                    f"{units.size(free)} of {units.size(total)} are free",
                    hint="Another process took it: see nvidia-smi, or choose another GPU.",
                ) from error
        return Piece(block, gpu, handle, None)

    def _free_piece(self, piece: Piece) -> None:
        with self._contexts.current(piece.gpu):
            # If one piece can't be freed, the others must be all the same: this process stays.
            if piece.address is not None:
                with suppress(CudaError):
                    self._cuda.unmap(piece.address, piece.block.size)
            with suppress(CudaError):
                self._cuda.release(piece.handle)
        if piece.descriptor is not None:
            os.close(piece.descriptor)

    def _free(self, holding: KeyHolding, keep: frozenset[str] = frozenset()) -> None:
        """Free the memory, and the contexts except those on the GPUs of ``keep``."""
        pieces, holding.pieces = holding.pieces, []
        for piece in pieces:
            self._free_piece(piece)
        gpus, holding.gpus = holding.gpus - keep, holding.gpus & keep
        for gpu in gpus:
            with suppress(CudaError):
                self._contexts.let_go(gpu)
