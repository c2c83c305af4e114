# SPDX-License-Identifier: Apache-2.0
"""What stands on the wire around the bytes: a chunk's header, an answer, and their limits."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from ...errors import LiveshiftError

CHUNK = 1 << 20
"""Bytes of one chunk at most; a peer that sends more loses its connection."""

HEADER = 8192
"""Bytes of a header at most: a stream may be named after a path."""

OVERHEAD = 256
"""Bytes that CURVE or a seal, and ZMTP, may add to a chunk (33 with libzmq 4.3)."""

LANES = 32
"""Lanes for memory that one migration has at most, besides lane 0."""

Kind = Literal["memory", "rate"]
MEMORY: Final = "memory"
RATE: Final = "rate"
"""What comes on the other lanes: pages, and nothing but bytes to measure with."""

PAGE_TABLE = MEMORY
"""The stream that says, on lane 0 and behind them all, which pages there are."""

WANTS, SEAL = "wants", "seal"
"""What questions are called, on lane 0: which pages that were only named have to come after all?
Will you open what is sealed with this key?"""

RATE_LIMIT = 256 << 20
"""Bytes of ``rate`` streams that one migration may send."""


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk on lane 0.

    ``number``: of the chunk on its lane. ``digest``: xxh3-64 of the second frame.
    """

    migration: _Name
    number: _Number
    stream: Annotated[str, msgspec.Meta(min_length=1, max_length=HEADER)]
    digest: Annotated[int, msgspec.Meta(ge=0)]


class PageHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk on another lane. It goes in clear; the second is sealed with it.

    ``kind``: MEMORY or RATE. ``raw``: bytes that the second frame is once opened and decompressed;
    0 where it was not compressed. A digest would tell a listener which pages they are.
    """

    migration: _Name
    lane: Annotated[int, msgspec.Meta(ge=1, le=LANES)]
    number: _Number
    kind: Kind
    raw: Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]


_headers = msgspec.msgpack.Decoder(Header)
_page_headers = msgspec.msgpack.Decoder(PageHeader)
_answers = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_wants = msgspec.msgpack.Decoder(bytes)
_others = msgspec.msgpack.Decoder(int | str)

_Header = TypeVar("_Header", Header, PageHeader)


def read_header(raw: bytes | memoryview) -> Header:
    """Raises LiveshiftError for bytes that are none."""
    return _read(_headers, raw)


def read_page_header(raw: bytes | memoryview) -> PageHeader:
    """Raises LiveshiftError for bytes that are none."""
    return _read(_page_headers, raw)


def _read(decoder: msgspec.msgpack.Decoder[_Header], raw: bytes | memoryview) -> _Header:
    if len(raw) > HEADER:
        raise LiveshiftError(f"a header has {len(raw)} bytes, at most {HEADER} are taken")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"a header is not understood: {error}") from error


def read_answer(raw: bytes | memoryview) -> tuple[str, int | str | bytes]:
    """Raises LiveshiftError for bytes that are none."""
    try:
        kind, value = _answers.decode(raw)
        return kind, (_wants if kind == WANTS else _others).decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"an answer is not understood: {error}") from error
