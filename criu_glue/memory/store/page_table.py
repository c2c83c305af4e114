# SPDX-License-Identifier: Apache-2.0
"""The table of a capsule's pages: all that exist at the freeze, as the source sends it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ....errors import StepFailed

PROCESSES_MOST = 32768  # store.h

TABLE_LIMIT = 256 << 20
"""A table has at most this many bytes. Each run takes 16, and memory that is split very much has
millions of runs."""


class ProcessTable(msgspec.Struct, forbid_unknown_fields=True):
    """The pages of one process that exist. ``runs`` are ordered pairs of (address, pages). A pair
    is two little-endian 64-bit numbers."""

    incarnation: int
    runs: bytes


Table = Mapping[int, ProcessTable]
"""The table of a capsule, by inner pid."""


def read_table(raw: bytes | memoryview) -> dict[int, ProcessTable]:
    """Parse the table as it comes over the wire (MessagePack). Raises StepFailed."""
    if (count := _entries(bytes(raw[:5]))) > PROCESSES_MOST:
        raise StepFailed(
            "ship", f"the table of memory names {count} processes, more than {PROCESSES_MOST}"
        )
    try:
        return msgspec.msgpack.decode(raw, type=dict[int, ProcessTable])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StepFailed("ship", f"the table of memory is not understood: {error}") from error


def _entries(head: bytes) -> int:
    """Return how many entries a MessagePack map says that it has; 0: it is not a map.

    The caller checks this number before it makes any entry. So data from another host cannot take
    much more memory than it has bytes."""
    kind = head[0] if head else 0
    if kind >> 4 == 8:
        return kind & 15
    size = {0xDE: 2, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(head[1 : 1 + size], "big")
