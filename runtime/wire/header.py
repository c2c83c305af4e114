# SPDX-License-Identifier: Apache-2.0
"""What stands on the wire around the bytes: a chunk's header, an answer, and their limits."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...errors import LiveshiftError

CHUNK = 1 << 20
"""Bytes of one chunk at most; a peer that sends more loses its connection."""

HEADER = 8192
"""Bytes of a header at most: a stream may be named after a path."""

OVERHEAD = 256
"""Bytes that CURVE and ZMTP may add to a chunk (33 with libzmq 4.3)."""

LANES = 32
"""Lanes for memory that one migration has at most, besides lane 0."""

MEMORY, RATE = "memory", "rate"
PAGE_TABLE = MEMORY
"""``memory:k`` is the one stream of lane k; ``memory``, on lane 0 and behind them all, says which
pages there are. ``rate:k`` is nothing but bytes to measure with."""

WANTS = "wants"
"""What a question is called, on lane 0: which pages that were only named have to come after all."""

RATE_LIMIT = 256 << 20
"""Bytes of ``rate`` streams that one migration may send."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk.

    ``number``: of the chunk on its lane. ``digest``: xxh3-64 of the second frame. ``raw``: bytes
    that the second frame is once decompressed; 0 where it was not compressed.
    """

    migration: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    number: Annotated[int, msgspec.Meta(ge=0)]
    stream: Annotated[str, msgspec.Meta(min_length=1, max_length=HEADER)]
    digest: Annotated[int, msgspec.Meta(ge=0)]
    lane: Annotated[int, msgspec.Meta(ge=0, le=LANES)] = 0
    raw: Annotated[int, msgspec.Meta(ge=0, le=CHUNK)] = 0


_headers = msgspec.msgpack.Decoder(Header)
_answers = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_wants = msgspec.msgpack.Decoder(bytes)
_others = msgspec.msgpack.Decoder(int | str)


def read_header(raw: bytes | memoryview) -> Header:
    """Raises LiveshiftError for bytes that are none."""
    if len(raw) > HEADER:
        raise LiveshiftError(f"a header of {len(raw)} bytes, at most {HEADER} are taken")
    try:
        return _headers.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"a header that is not understood: {error}") from error


def read_answer(raw: bytes | memoryview) -> tuple[str, int | str | bytes]:
    """Raises LiveshiftError for bytes that are none."""
    try:
        kind, value = _answers.decode(raw)
        return kind, (_wants if kind == WANTS else _others).decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"an answer that is not understood: {error}") from error
