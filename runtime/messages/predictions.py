# SPDX-License-Identifier: Apache-2.0
"""What messages say about the pause that a move is expected to need. Seconds, bytes."""

from __future__ import annotations

import msgspec


class Writing(msgspec.Struct, frozen=True):
    """What a capsule was seen to write. ``rate``: bytes a second in the busiest of some short
    looks; ``set``: bytes written in one of ``seconds``: what is written again counts once."""

    rate: float
    set: int
    seconds: float


class Part(msgspec.Struct, frozen=True):
    """One part of an expected pause; ``detail``: what it was reckoned from, in words.

    ``seconds`` None: nothing tells how long it takes. ``bytes``: what has to go over meanwhile,
    None where that is not what counts. ``untaught``: what it would be by the defaults alone; how
    far off those were in earlier moves is what later ones are corrected by.
    """

    name: str
    seconds: float | None
    bytes: int | None = None
    detail: str = ""
    untaught: float = 0.0


class Prediction(msgspec.Struct, frozen=True):
    """How long a move will pause the job; ``seconds`` is the sum of the parts known.

    ``way``: by which memory goes, "pre-copy" or "full dump"; ``why`` a full one, else empty.
    ``learnt``: from how many earlier moves of this cluster. ``memory``: anonymous memory that the
    capsule has; ``left_out``: what the sum does not count, in words, else empty.
    """

    way: str
    why: str
    seconds: float
    parts: list[Part]
    memory: int
    learnt: int = 0
    left_out: str = ""
