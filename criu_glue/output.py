# SPDX-License-Identifier: Apache-2.0
"""The record log that capsule-init writes: what a capsule printed, and when.

One record is a 16-byte header (realtime in ns, length in bytes, stream) and the bytes; see
``struct record`` in capsule_output.c. The log only grows and moves with its capsule, so an offset
into it means the same on every host: a reader that keeps its offset loses and doubles nothing.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import LiveshiftError
from .room import Room

HEADER = struct.Struct("<QII")
MARK, STDOUT, STDERR = 0, 1, 2


@dataclass(frozen=True)
class Record:
    realtime_ns: int
    stream: int
    data: bytes


def split(raw: bytes) -> Iterator[Record]:
    """Cut raw log bytes, which must begin at a record, into records; a cut last one is left out."""
    at = 0
    while at + HEADER.size <= len(raw):
        realtime_ns, length, stream = HEADER.unpack_from(raw, at)
        end = at + HEADER.size + length
        if end > len(raw):
            return
        yield Record(realtime_ns, stream, raw[at + HEADER.size : end])
        at = end


def whole(raw: bytes) -> int:
    """How many bytes of ``raw`` are whole records."""
    return sum(HEADER.size + len(record.data) for record in split(raw))


def settle(room: Room, after: int = 0, deadline_s: float = 5.0) -> None:
    """Return when everything the frozen tasks have written to their pipes is in the log.

    Asks process 1 for a mark and waits for it. ``after`` is an offset at which a record begins:
    the log's size is none, since process 1 may just be writing. Raises LiveshiftError after
    ``deadline_s``.
    """
    with room.plan.log.open("rb") as log:
        log.seek(after)
        at = after + whole(log.read())
        os.kill(room.init, signal.SIGUSR1)
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            log.seek(at)
            if any(record.stream == MARK for record in split(log.read())):
                return
            time.sleep(0.001)
    raise LiveshiftError(
        f"process 1 of {room.plan.hostname} did not settle its output within {deadline_s:g} s"
    )
