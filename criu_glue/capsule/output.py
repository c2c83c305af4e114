# SPDX-License-Identifier: Apache-2.0
"""Reads the log that capsule-init writes: what a capsule printed, and when.

One record is a 16-byte header (realtime in ns, length in bytes, stream) and the bytes; see
``struct record`` in capsule_output.c. An offset counts the bytes of the whole log, from the
capsule's first byte on. The log is a directory of segments. Each segment's name is the offset at
which it begins. The log moves with its capsule, so an offset means the same on every host. A reader
that keeps its offset reads no byte twice. The offset of the next record shows it how many bytes are
missing: those were rotated away (``logs.keep``), or a full disk could not take them.

A rewind cuts the log back to where the snapshot has it. What the capsule prints then is other
output, though it may look alike. So it begins at an offset that no earlier output can have had:
``REWIND`` times the number of rewinds.
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
from .sandboxes import OUTPUT_PAGE_FD, STDERR_FD, STDOUT_FD, Sandbox

HEADER = struct.Struct("<QII")
STDOUT, STDERR = 1, 2

LARGEST = HEADER.size + (64 << 10)
"""A record has at most this many bytes, header included."""

SEGMENT = re.compile(r"[0-9]{20}")
"""The pattern of a segment's file name."""

UNKNOWN = 2**64 - 1

REWIND = 1 << 48
"""Bytes of offsets between two rewinds: no log ever has as many, and 64 bits hold 65,535 of it."""

_PAGE = struct.Struct("<4Q")


@dataclass(frozen=True)
class OutputRecord:
    """``repeated``: the capsule was taken back to a snapshot from before it printed this."""

    realtime_ns: int
    stream: int
    data: bytes
    repeated: bool = False


@dataclass(frozen=True)
class Written:
    """What process 1 reports of the log (``struct page`` in capsule_output.c)."""

    end: int
    """The offset at which the next record will begin; UNKNOWN before the sandbox's first record."""
    busy: bool
    """True if process 1 may have taken output from a pipe that is not in the log yet."""
    lost: int
    """Bytes of records that could not be written since the sandbox was built."""
    error: int
    """The errno of the last record's write, 0 if it was written."""


def split(raw: bytes) -> Iterator[OutputRecord]:
    """Cut raw log bytes into records. They must begin at a record; a partial last record is left
    out."""
    at = 0
    while at + HEADER.size <= len(raw):
        realtime_ns, length, stream = HEADER.unpack_from(raw, at)
        end = at + HEADER.size + length
        if end > len(raw):
            return
        yield OutputRecord(realtime_ns, stream, raw[at + HEADER.size : end])
        at = end


def whole(raw: bytes) -> int:
    """The number of bytes at the start of ``raw`` that are whole records."""
    return sum(HEADER.size + len(record.data) for record in split(raw))


def segments(log: Path) -> list[int]:
    """The offsets at which the existing segments begin, in order."""
    return sorted(int(name) for name in os.listdir(log) if SEGMENT.fullmatch(name))


def segment(log: Path, begins: int) -> Path:
    return log / f"{begins:020}"


def begin_after_rewind(log: Path, rewinds: int) -> None:
    """Make the log of a sandbox that is about to be built; its records begin at this rewind's
    offset. Process 1 writes behind the last segment that is there when the first record comes: it
    is this empty one, since all that the image brings was printed before."""
    log.mkdir(mode=0o700, exist_ok=True)
    segment(log, rewinds * REWIND).touch(mode=0o600)


def rewinds_at(offset: int) -> int:
    """How often the capsule had been rewound when it printed what is at this offset."""
    return offset // REWIND


def size(log: Path) -> int:
    """Bytes of all existing segments."""
    total = 0
    for begins in segments(log):
        with contextlib.suppress(FileNotFoundError):  # rotated away just now
            total += segment(log, begins).stat().st_size
    return total


def read(log: Path, offset: int, limit: int) -> tuple[int, bytes]:
    """(offset where they begin, whole records from ``offset`` on), about ``limit`` bytes at most.

    They begin later than ``offset`` if the bytes there are gone. No bytes mean that the log has no
    more yet.

    If the capsule was rewound twice to the same snapshot, the log has nothing of the time between
    the two rewinds. The segment before such an offset is then of another count of rewinds, and
    ``offset`` is not in it: ext4 refuses to seek as far (EINVAL)."""
    begins = segments(log)
    before = [b for b in begins if b <= offset][-1:]
    own = [b for b in before if rewinds_at(b) == rewinds_at(offset)]
    at = offset
    for start in own + [b for b in begins if b > offset]:
        at = max(offset, start)
        with contextlib.suppress(FileNotFoundError), segment(log, start).open("rb") as file:
            if at - start >= os.fstat(file.fileno()).st_size:
                continue
            file.seek(at - start)
            raw = file.read(max(limit, LARGEST))
            if end := whole(raw):
                return at, raw[:end]
    return at, b""


def written(sandbox: Sandbox) -> Written:
    """Read what process 1 reports of the log; raises LiveshiftError if process 1 has ended."""
    try:
        with open(f"/proc/{sandbox.init}/fd/{OUTPUT_PAGE_FD}", "rb", buffering=0) as page:
            end, busy, lost, error = _PAGE.unpack(page.read(_PAGE.size))
    except (OSError, struct.error) as gone:
        raise _ended(sandbox) from gone
    return Written(end, bool(busy), lost, error)


def _ended(sandbox: Sandbox) -> LiveshiftError:
    return LiveshiftError(f"{sandbox.plan.hostname} has ended: its first process is gone")


def settle(sandbox: Sandbox, deadline_s: float = 5.0) -> None:
    """Return when everything that the frozen tasks have written to their pipes is in the log.

    Raises LiveshiftError after ``deadline_s``, or if process 1 has ended.
    """
    until = time.monotonic() + deadline_s
    # The order matters: bytes that left a pipe are in the log, unless process 1 is busy with them.
    while _in_pipes(sandbox) or written(sandbox).busy:
        if time.monotonic() > until:
            raise LiveshiftError(
                f"process 1 of {sandbox.plan.hostname} did not settle its output within"
                f" {deadline_s:g} s"
            )
        time.sleep(0.0005)


def _in_pipes(sandbox: Sandbox) -> int:
    """Bytes in the output pipes that process 1 has not read yet."""
    waiting = 0
    for number in (STDOUT_FD, STDERR_FD):
        try:
            fd = os.open(f"/proc/{sandbox.init}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as gone:
            raise _ended(sandbox) from gone
        try:
            (bytes_,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
            waiting += bytes_
        finally:
            os.close(fd)
    return waiting
