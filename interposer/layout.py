# SPDX-License-Identifier: Apache-2.0
"""The Python mirror of ``page.h``: the places and sizes of its fields, and nothing else.

``page.h`` says what the layout is, and who writes a field and when. Each table here repeats the
order and sizes of one of its structures; tests/interposer/test_page_layout.py holds the two equal.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Any

MAGIC = b"LIVESHFT"
LAYOUT = 2

Fields = tuple[tuple[str, str], ...]
"""The fields of a structure in order: each has a name and a format code of Python's ``struct``."""


class CStruct:
    """One structure of page.h: little-endian, without padding between the fields."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.names = tuple(name for name, _ in fields)
        self.struct = struct.Struct("<" + "".join(code for _, code in fields))
        self.size = self.struct.size
        self.offsets: dict[str, int] = {}
        at = 0
        for name, code in fields:
            self.offsets[name] = at
            at += struct.calcsize("<" + code)

    def unpack(self, raw: bytes, at: int = 0) -> dict[str, Any]:
        return dict(zip(self.names, self.struct.unpack_from(raw, at), strict=True))

    def rows(self, raw: bytes) -> Iterable[tuple[Any, ...]]:
        """Every whole record in ``raw``, in the order of the fields."""
        return self.struct.iter_unpack(raw[: len(raw) // self.size * self.size])


ORDER = CStruct(
    (
        ("want", "I"),
        ("attempt", "I"),
        ("version", "I"),
        ("heartbeat", "I"),
        ("lease_ms", "I"),
        ("limit_ms", "I"),
        ("check", "I"),
        ("missing_count", "I"),
    )
)

ANSWER = CStruct(
    (
        ("reopened", "I"),
        ("changes", "I"),
        ("groups", "I"),
        ("untracked", "I"),
        ("unidentified", "Q"),
        ("done_attempt", "I"),
        ("done_version", "I"),
        ("done_result", "I"),
        ("done_want", "I"),
        ("down", "I"),
        ("unused", "I"),
        ("drained_ns", "Q"),
        ("torn_down_ns", "Q"),
        ("rebuilt_ns", "Q"),
        ("message", "160s"),
    )
)

LEDGER = CStruct(
    (
        ("made", "Q"),
        ("freed", "Q"),
        ("missed", "Q"),
        ("events", "Q"),
        ("graphs", "Q"),
        ("graph_execs", "Q"),
        ("graphs_with_nccl", "Q"),
        ("driver", "I"),
        ("rows", "I"),
    )
)

IDENTITY = CStruct(
    (
        ("magic", "8s"),
        ("layout", "I"),
        ("kinds", "I"),
        ("pid", "i"),
        ("rank", "i"),
        ("world_size", "i"),
        ("local_rank", "i"),
        ("created_ns", "Q"),
        ("version", "24s"),
        ("command", "64s"),
    )
)

TABLES = CStruct(
    (
        ("clocks", "I"),
        ("communicators", "I"),
        ("streams", "I"),
        ("unused", "I"),
        ("retired", "Q"),
    )
)
"""The header's last fields before its rows: how many rows of the tables have been used."""

COUNTER = CStruct((("kind", "24s"), ("started", "Q")))

THREAD = CStruct(
    (
        ("tid", "i"),
        ("state", "I"),
        ("clock", "I"),
        ("wants", "I"),
        ("kind", "I"),
        ("unused", "I"),
    )
)

MISSING_CLOCK = CStruct((("id", "Q"), ("target", "Q"), ("communicator", "I"), ("unused", "I")))

CLOCK = CStruct(
    (
        ("id", "Q"),
        ("announced", "Q"),
        ("returned", "Q"),
        ("raised", "Q"),
        ("target", "Q"),
        ("communicator", "I"),
        ("from", "i"),
        ("to", "i"),
        ("owner", "i"),
        ("kind", "I"),
        ("blocking", "I"),
    )
)

COMMUNICATOR = CStruct(
    (
        ("state", "I"),
        ("library", "I"),
        ("id", "Q"),
        ("parent", "Q"),
        ("size", "i"),
        ("rank", "i"),
        ("device", "i"),
        ("made_by", "I"),
        ("ordinal", "I"),
        ("generation", "I"),
        ("name", "64s"),
        ("unsafe", "128s"),
        ("fresh_id", "128s"),
        ("rebuild_id", "128s"),
        ("fresh_attempt", "I"),
        ("rebuild_order", "I"),
        ("operations", "Q"),
    )
)

STREAM = CStruct(
    (
        ("handle", "Q"),
        ("device", "i"),
        ("flags", "I"),
        ("priority", "i"),
        ("use", "I"),
    )
)

ALLOCATION = CStruct(
    (
        ("address", "Q"),
        ("size", "Q"),
        ("handle", "Q"),
        ("stream", "Q"),
        ("kind", "I"),
        ("device", "i"),
        ("flags", "Q"),
        ("serial", "Q"),
        ("unused", "Q"),
    )
)

COUNTERS, THREADS, MISSING_CLOCKS = 64, 64, 128
CLOCKS, COMMUNICATORS, STREAMS, ALLOCATIONS = 4096, 512, 1024, 65536

# Where things lie in the file, in bytes.
ORDER_AT = IDENTITY.size
ANSWER_AT = ORDER_AT + ORDER.size
LEDGER_AT = ANSWER_AT + ANSWER.size
TABLES_AT = LEDGER_AT + LEDGER.size
THREADS_AT = TABLES_AT + TABLES.size
COUNTERS_AT = THREADS_AT + THREADS * THREAD.size
MISSING_CLOCKS_AT = COUNTERS_AT + COUNTERS * COUNTER.size
HEADER_SIZE = 8192
CLOCKS_AT = HEADER_SIZE
COMMUNICATORS_AT = CLOCKS_AT + CLOCKS * CLOCK.size
STREAMS_AT = COMMUNICATORS_AT + COMMUNICATORS * COMMUNICATOR.size
ALLOCATIONS_AT = STREAMS_AT + STREAMS * STREAM.size
SIZE = ALLOCATIONS_AT + ALLOCATIONS * ALLOCATION.size
"""The file can grow to this many bytes; a new one has ALLOCATIONS_AT bytes."""


class WantedState(enum.IntEnum):
    """enum liveshift_want."""

    OPEN = 0
    ARMED = 1
    TARGET = 2
    CLOSED = 3
    TEARDOWN = 4
    FRESH_IDS = 5
    REBUILD = 6
    DEVICES = 7


class Library(enum.IntEnum):
    """enum liveshift_library."""

    GLOO = 1
    NCCL = 2


class CommunicatorState(enum.IntEnum):
    """enum liveshift_communicator_state."""

    FREE = 0
    LIVE = 1
    DOWN = 2
    ENDED = 3


class MemoryKind(enum.IntEnum):
    """enum liveshift_memory."""

    FREE = 0
    DEVICE = 2
    POOL = 3
    MANAGED = 4
    PINNED = 5
    REGISTERED = 6
    RESERVED = 7
    PHYSICAL = 8
    MAPPED = 9
    IMPORTED = 10
    EXPORTED = 11
    NCCL = 12
    MULTICAST = 13
    EVENT = 14
    ARENA = 15


def check_of(want: int, attempt: int, version: int) -> int:
    """The value of ``order.check`` that says that these three numbers belong together."""
    return ~(want * 0x01000193 ^ attempt * 0x9E3779B1 ^ version) & 0xFFFFFFFF


def text_of(padded: bytes) -> str:
    """Decode NUL-padded text. The job's user chose the bytes, so characters that a terminal might
    obey are replaced."""
    text = padded.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
