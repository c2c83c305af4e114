# SPDX-License-Identifier: Apache-2.0
"""The frame formats of the wire: the header of a chunk, the answer to one, and their limits."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec

from ...errors import LiveshiftError

CHUNK = 1 << 20
"""A chunk has at most this many bytes; a peer that sends more loses its connection."""

HEADER = 8192
"""A header has at most this many bytes. It may hold a path, as the name of a stream."""

OVERHEAD = 256
"""CURVE or a seal, and ZMTP, add at most this many bytes to a chunk (33 with libzmq 4.3)."""

LANES = 32
"""One migration has at most this many lanes for memory, besides lane 0."""

Kind = Literal["memory", "device", "rate"]
MEMORY: Final = "memory"
DEVICE: Final = "device"
RATE: Final = "rate"
"""A chunk on another lane than 0 holds pages of host memory (MEMORY), bytes of device memory
(DEVICE), or bytes that only measure the link (RATE)."""

PAGE_TABLE = MEMORY
"""The name of the stream on lane 0 that lists all tracked pages. It comes after the pages."""

WANTS, SEAL = "wants", "seal"
"""The names of the two questions on lane 0. WANTS asks which pages, of those that were only named,
the source must send after all. SEAL asks the destination to use a new key."""

RATE_LIMIT = 256 << 20
"""One migration may send at most this many bytes in chunks of the kind ``rate``."""


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk on lane 0.

    ``number``: the chunk's number on its lane. ``digest``: xxh3-64 of the second frame.
    """

    migration: _Name
    number: _Number
    stream: Annotated[str, msgspec.Meta(min_length=1, max_length=HEADER)]
    digest: Annotated[int, msgspec.Meta(ge=0)]


class PageHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a chunk on another lane. It goes in clear, but the seal covers it too.

    ``raw``: the size of the second frame in bytes once it is opened and decompressed; 0 where it
    was not compressed. ``process``, ``at``: for DEVICE, the process (the capsule's pid) and the
    place of the chunk in its device memory. There is no digest: from a digest a listener could
    learn which pages the chunk carries.
    """

    migration: _Name
    lane: Annotated[int, msgspec.Meta(ge=1, le=LANES)]
    number: _Number
    kind: Kind
    raw: Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]
    process: _Number = 0
    at: _Number = 0


_headers = msgspec.msgpack.Decoder(Header)
_page_headers = msgspec.msgpack.Decoder(PageHeader)
_answers = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_wants = msgspec.msgpack.Decoder(bytes)
_others = msgspec.msgpack.Decoder(int | str)

_Header = TypeVar("_Header", Header, PageHeader)


def read_header(raw: bytes | memoryview) -> Header:
    """Decode a header of lane 0; raises LiveshiftError for bytes that are not one."""
    return _read(_headers, raw)


def read_page_header(raw: bytes | memoryview) -> PageHeader:
    """Decode a header of a lane for pages; raises LiveshiftError for bytes that are not one."""
    return _read(_page_headers, raw)


def _read(decoder: msgspec.msgpack.Decoder[_Header], raw: bytes | memoryview) -> _Header:
    if len(raw) > HEADER:
        raise LiveshiftError(f"a header has {len(raw)} bytes, at most {HEADER} are taken")
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"a header is not understood: {error}") from error


def read_answer(raw: bytes | memoryview) -> tuple[str, int | str | bytes]:
    """Decode an answer; raises LiveshiftError for bytes that are not one."""
    try:
        kind, value = _answers.decode(raw)
        return kind, (_wants if kind == WANTS else _others).decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"an answer is not understood: {error}") from error
