# SPDX-License-Identifier: Apache-2.0
"""Device memory changing hands: from a process to the helper, and back.

At every moment either the process has a block's memory, or the helper, or both: a block is released
by the process only when the helper has it, and dropped by the helper only when the process has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ... import units
from ...errors import LiveshiftError, StepFailed
from ...interposer.layout import Memory
from .blocks import Block
from .device_memory import DeviceMemory, Holding
from .process_session import STEP, ProcessSession


def give_up(session: ProcessSession, memory: DeviceMemory, key: str) -> list[Block]:
    """Take all arena memory that the process has into the key's; all or nothing.

    Raises LiveshiftError; the process then has its memory, unless the message says that the helper
    still holds it for the key."""
    session.sync()
    ours = [block for block, here in session.blocks() if here and block.kind == Memory.ARENA]

    def exported() -> Iterator[tuple[Block, int]]:
        for block in ours:
            yield block, session.export(block)

    memory.adopt(key, exported())
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
    holding: Holding,
    released: set[int],
    error: LiveshiftError,
) -> None:
    """Map what was released; then the key is dropped. Else it is kept, and the error says so."""
    lacking = [piece for piece in holding.pieces if piece.block.address in released]
    # The one whose release failed may be gone all the same where no answer came.
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
    if session.over:  # nothing was released for certain, and nothing can be asked
        raise StepFailed(
            STEP, f"{error}; the GPU helper holds its device memory for {holding.key}"
        ) from error
    memory.drop(holding.key)


def take_back(
    session: ProcessSession,
    memory: DeviceMemory,
    key: str,
    keep: bool = False,
    gpus: Mapping[str, str] | None = None,
) -> None:
    """Give the process the key's memory for all blocks that it gave up, on the GPU for which it was
    made, or that ``gpus`` has in its place; the key is dropped then, unless it is to ``keep``. On
    an error the key stays, and this may be called again: what the process has is not given twice.

    Raises LiveshiftError; before anything is given where blocks or bytes are missing."""
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
            made_for = piece.block.gpu  # the process may name its GPUs as they were before
            memory.bring_to(holding, piece, (gpus or {}).get(made_for, made_for))
            with memory.descriptor(piece) as descriptor:
                session.map(block, descriptor)
    if not keep:
        memory.drop(key)


def own(session: ProcessSession) -> None:
    """Have all arena memory that the process has be its own again, before a checkpoint takes it
    along: drivers take none that was imported, as what came back from a helper was.

    Raises LiveshiftError, where a GPU has no room for the largest block twice, say; it may then be
    called again."""
    for block, here in session.blocks():
        if here and block.kind == Memory.ARENA:
            session.own(block)
