# SPDX-License-Identifier: Apache-2.0
"""The record log that capsule-init writes: what a capsule printed, and when.

One record is a 16-byte header (realtime in ns, length in bytes, stream) and the bytes; see
``struct record`` in capsule_output.c. Offsets count in the whole log, from the capsule's first
byte on. The log lies in a directory of segments, each named by the offset at which it begins. It
moves with its capsule, so an offset means the same on every host: a reader that keeps its offset
doubles nothing, and sees by the offset of what comes next how much is not there any more. That is
what has been rotated away (``logs.keep``), or could not be written to a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import LiveshiftError
from .room import OUTPUT_PAGE_FD, STDERR_FD, STDOUT_FD, Room

HEADER = struct.Struct("<QII")
STDOUT, STDERR = 1, 2

LARGEST = HEADER.size + (64 << 10)
"""Bytes of one record at most."""

SEGMENT = re.compile(r"[0-9]{20}")
"""The name of a segment's file."""

UNKNOWN = 2**64 - 1

_PAGE = struct.Struct("<4Q")


@dataclass(frozen=True)
class Record:
    realtime_ns: int
    stream: int
    data: bytes


@dataclass(frozen=True)
class Written:
    """What process 1 says of the log (``struct page`` in capsule_output.c)."""

    end: int
    """Where the next record would begin; UNKNOWN before the room's first one."""
    busy: bool
    """Something was taken from a pipe and is not in the log yet."""
    lost: int
    """Bytes of records that could not be written since the room was built."""
    error: int
    """The errno of the last record, 0 when it was written."""


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


def segments(log: Path) -> list[int]:
    """Where the segments begin that are there, in order."""
    return sorted(int(name) for name in os.listdir(log) if SEGMENT.fullmatch(name))


def segment(log: Path, begins: int) -> Path:
    return log / f"{begins:020}"


def size(log: Path) -> int:
    """Bytes of all segments that are there."""
    total = 0
    for begins in segments(log):
        with contextlib.suppress(FileNotFoundError):  # rotated away just now
            total += segment(log, begins).stat().st_size
    return total


def read(log: Path, offset: int, limit: int) -> tuple[int, bytes]:
    """Whole records from ``offset`` on, of about ``limit`` bytes at most, and where they begin:
    later than ``offset`` if what was there is not there any more. Without bytes: there is no more
    yet."""
    begins = segments(log)
    behind = [b for b in begins if b <= offset][-1:] + [b for b in begins if b > offset]
    at = offset
    for start in behind:
        at = max(offset, start)
        with contextlib.suppress(FileNotFoundError), segment(log, start).open("rb") as file:
            file.seek(at - start)
            raw = file.read(max(limit, LARGEST))
            if end := whole(raw):
                return at, raw[:end]
    return at, b""


def written(room: Room) -> Written:
    """What process 1 says of the log; raises LiveshiftError when it has ended."""
    try:
        with open(f"/proc/{room.init}/fd/{OUTPUT_PAGE_FD}", "rb", buffering=0) as page:
            end, busy, lost, error = _PAGE.unpack(page.read(_PAGE.size))
    except (OSError, struct.error) as gone:
        raise _ended(room) from gone
    return Written(end, bool(busy), lost, error)


def _ended(room: Room) -> LiveshiftError:
    return LiveshiftError(f"{room.plan.hostname} has ended: its first process is gone")


def settle(room: Room, deadline_s: float = 5.0) -> None:
    """Return when everything the frozen tasks have written to their pipes is in the log.

    Raises LiveshiftError after ``deadline_s``, or when process 1 has ended.
    """
    until = time.monotonic() + deadline_s
    # In this order: what is not in a pipe any more is in the log, unless process 1 is busy with it.
    while _in_pipes(room) or written(room).busy:
        if time.monotonic() > until:
            raise LiveshiftError(
                f"process 1 of {room.plan.hostname} did not settle its output within"
                f" {deadline_s:g} s"
            )
        time.sleep(0.0005)


def _in_pipes(room: Room) -> int:
    """Bytes that process 1 has not taken yet."""
    waiting = 0
    for number in (STDOUT_FD, STDERR_FD):
        try:
            fd = os.open(f"/proc/{room.init}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as gone:
            raise _ended(room) from gone
        try:
            (bytes_,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
            waiting += bytes_
        finally:
            os.close(fd)
    return waiting
