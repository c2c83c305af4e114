# SPDX-License-Identifier: Apache-2.0
"""One file of a saved image: its data without the holes, as one frame of zstd (RFC 8878).

The file of a store is far larger than its data (held_store.py), so the holes are kept. The SHA-256
is of the bytes on the disk, so that `sha256sum` shows a damaged one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, cast

import msgspec
import zstandard

from ....criu_glue.files.sparse import extents
from ....errors import StepFailed

LEVEL = 1
"""The level of zstd. An image is mostly numbers, which higher levels shrink little more."""
SUFFIX = ".zst"
_CHUNK = 4 << 20


class SavedFile(msgspec.Struct, frozen=True):
    """``size``: bytes of the file. ``parts``: where it has data, as (begin, end) in bytes, in
    order. ``stored``: bytes on the disk."""

    size: int
    parts: list[tuple[int, int]]
    stored: int
    sha256: str


class _Hashed:
    """A stream that is hashed as it is written or read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._note(data)
        return self._file.write(data)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._note(data)
        return data

    def _note(self, data: bytes) -> None:
        self.sha256.update(data)
        self.size += len(data)


def write(source: Path, target: Path) -> SavedFile:
    """Write what is in ``source`` to ``target``, which does not exist, and to the disk. Raises
    OSError."""
    with source.open("rb", buffering=0) as old, target.open("xb") as new:
        os.fchmod(new.fileno(), 0o600)
        size = os.fstat(old.fileno()).st_size
        parts = [(at, at + length) for at, length in extents(old.fileno(), size)]
        stored = _Hashed(new)
        # zstandard needs no more of a stream than what _Hashed has.
        writer = zstandard.ZstdCompressor(level=LEVEL).stream_writer
        with writer(cast("IO[bytes]", stored), closefd=False) as packed:
            for begin, end in parts:
                at = begin
                while at < end:
                    data = os.pread(old.fileno(), min(_CHUNK, end - at), at)
                    if not data:
                        raise OSError(f"{source} has become shorter")
                    packed.write(data)
                    at += len(data)
        new.flush()
        os.fsync(new.fileno())
    return SavedFile(size, parts, stored.size, stored.sha256.hexdigest())


def read(source: Path, target: Path, saved: SavedFile) -> None:
    """Write what :func:`write` has read to ``target``, which does not exist. Raises StepFailed if
    ``source`` is not the file that was written, OSError for other errors."""
    try:
        with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
            os.fchmod(new.fileno(), 0o600)
            new.truncate(saved.size)
            stored = _Hashed(old)
            reader = zstandard.ZstdDecompressor().stream_reader
            with reader(cast("IO[bytes]", stored), closefd=False) as packed:
                for begin, end in saved.parts:
                    at = begin
                    while at < end:
                        data = packed.read(min(_CHUNK, end - at))
                        if not data:
                            raise _damaged(source, "its data end early")
                        written = 0
                        while written < len(data):
                            written += os.pwrite(new.fileno(), data[written:], at + written)
                        at += len(data)
            while stored.read(_CHUNK):
                pass
    except zstandard.ZstdError as error:
        raise _damaged(source, str(error)) from error
    found = stored.size, stored.sha256.hexdigest()
    if found != (saved.stored, saved.sha256):
        raise _damaged(
            source,
            f"it has {found[0]} bytes with the SHA-256 {found[1]}, and {saved.stored} with"
            f" {saved.sha256} were written",
        )


def _damaged(source: Path, why: str) -> StepFailed:
    return StepFailed("restore", f"{source} is damaged: {why}")
