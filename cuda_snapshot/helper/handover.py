# SPDX-License-Identifier: Apache-2.0
"""Handover of device memory from a process to the helper, and back.

At every moment the process has a block's memory, or the helper has it, or both. The process
releases a block only when the helper has it. The helper drops it only when the process has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ... import units
from ...errors import LiveshiftError, StepFailed
from ...interposer.layout import MemoryKind
from .blocks import Block
from .device_memory import DeviceMemory, KeyHolding
from .process_session import STEP, Imported, ProcessSession


def give_up(session: ProcessSession, memory: DeviceMemory, key: str) -> list[Block]:
    """Take all arena memory of the process and hold it under the key; all or nothing.

    Raises LiveshiftError; then the process has its memory, unless the message says that the helper
    still holds it for the key."""
    session.sync()
    ours = [block for block, here in session.blocks() if here and block.kind == MemoryKind.ARENA]

    def exported() -> Iterator[tuple[Block, int]]:
        for block in ours:
            try:
                yield block, session.export(block)
            except Imported:  # an interposer of an earlier build did not copy it by itself
                session.own(block)
                yield block, session.export(block)

    memory.take_over(key, exported())
    with memory.use(key) as holding:
        released = []
        try:
            for block in ours:
                session.release(block)
                released.append(block.address)
        except LiveshiftError as error:
            _undo(session, memory, holding, set(released), error)
            raise
    return ours


def _undo(
    session: ProcessSession,
    memory: DeviceMemory,
    holding: KeyHolding,
    released: set[int],
    error: LiveshiftError,
) -> None:
    """Give the process the released blocks back, and then drop the key. If that fails, keep the key
    and say so in the error."""
    lacking = [piece for piece in holding.pieces if piece.block.address in released]
    # If no answer came to a release, the process may have released that block all the same.
    try:
        for piece in lacking:
            with memory.descriptor(piece) as descriptor:
                session.map(piece.block, descriptor)
    except LiveshiftError as second:
        size = sum(piece.block.size for piece in lacking)
        raise StepFailed(
            STEP,
            f"{error}; and up to {units.size(size)} of its device memory could not be given back "
            f"({second}): the GPU helper holds all of it for {holding.key}",
        ) from error
    if session.over:  # no block was surely released, and the process can't be asked any more
        raise StepFailed(
            STEP, f"{error}; the GPU helper holds its device memory for {holding.key}"
        ) from error
    memory.drop(holding.key)


def take_back(
    session: ProcessSession,
    memory: DeviceMemory,
    key: str,
    keep: bool,
    gpus: Mapping[str, str],
) -> None:
    """Give the process the key's memory for all blocks that it gave up, then drop the key (unless
    ``keep``). The memory goes onto the GPU for which it was made, or onto the GPU that ``gpus``
    names instead. On an error the key stays and this may be called again; a block that the process
    has is not given twice.

    Raises LiveshiftError. If blocks or bytes are missing, the process has got nothing then."""
    lacking = [block for block, here in session.blocks() if not here]
    with memory.use(key) as holding:
        if not holding.complete:
            raise StepFailed(
                STEP, f"the device memory of {key} was never filled: it must not be given back"
            )
        pieces = {piece.block.address: piece for piece in holding.pieces}
        missing = [
            block
            for block in lacking
            if block.address not in pieces or pieces[block.address].block.size != block.size
        ]
        if missing:
            raise StepFailed(
                STEP,
                f"the GPU helper does not hold {len(missing)} of {len(lacking)} blocks that the "
                f"process gave up for {key}, the first {units.size(missing[0].size)} at "
                f"{missing[0].address:#x}",
            )
        for block in lacking:
            piece = pieces[block.address]
            made_for = piece.block.gpu  # not block.gpu: the process may report its old GPUs
            memory.bring_to(holding, piece, gpus.get(made_for, made_for))
            with memory.descriptor(piece) as descriptor:
                session.map(block, descriptor)
    if not keep:
        memory.drop(key)


def own(session: ProcessSession) -> None:
    """Make all arena memory of the process its own again, before a checkpoint. Drivers' checkpoints
    take no imported memory, and memory that came back from a helper was imported.

    Raises LiveshiftError, for example if a GPU has no room for the largest block twice. It may then
    be called again."""
    session.sync()
    for block, here in session.blocks():
        if here and block.kind == MemoryKind.ARENA:
            session.own(block)
