# SPDX-License-Identifier: Apache-2.0
"""Files with holes in a tar stream: only the data and its offsets travel; a hole takes no bytes.

An entry with holes has the header ``LIVESHIFT.sparse``, the file's size in bytes. Its content is
extents in order. Each extent is an offset and a length (8 bytes each, little-endian) and that much
data. The total length of the extents is the entry's size. tar's own sparse formats keep a list of
all extents in memory, or in headers of unlimited size; our receiver keeps no such list.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections.abc import Iterator
from typing import IO, BinaryIO

HEADER = "LIVESHIFT.sparse"
BLOCK = 1 << 20
NARROW = 16 << 10
"""Holes shorter than this many bytes are sent as zeros, to limit the number of extents."""
_EXTENT = struct.Struct("<QQ")
_FAR = 1 << 63  # every offset of a file is smaller (off_t)


def extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of all data of a file, in order. Narrow holes count as data. On a file
    system without holes the whole file is one extent. It moves the position of ``fd``."""
    start = end = 0
    for at, until in _data(fd, size):
        if start < end and at - end < NARROW:
            end = until
            continue
        if start < end:
            yield start, end - start
        start, end = at, until
    if start < end:
        yield start, end - start


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, end) of each stretch of data, by lseek(2) with SEEK_DATA and SEEK_HOLE."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
            end = min(os.lseek(fd, at, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole to the end, or the file is shorter now
        if at < end:
            yield at, end
            at = end


def has_holes(file: BinaryIO) -> bool:
    """True if a file takes less disk space than its size. This is also true of compressed files."""
    s = os.fstat(file.fileno())
    return s.st_blocks * 512 < s.st_size


class Packed:
    """Reads a file as an entry's content; ``size`` is the content's length. Data that vanishes
    meanwhile is read as zeros, since the second pass sends such a file again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.file_size = os.fstat(file.fileno()).st_size
        self._extents = array("Q")  # offset, length and so on: there may be millions
        for extent in extents(file.fileno(), self.file_size):
            self._extents.extend(extent)
        self.size = len(self._extents) * 8 + sum(self._extents[1::2])
        self._content = self._read_all()
        self._rest = b""

    def read(self, n: int) -> bytes:
        """Return exactly ``n`` bytes; all reads together must not exceed ``size``."""
        parts, have = [self._rest], len(self._rest)
        while have < n:
            parts.append(next(self._content))
            have += len(parts[-1])
        whole = b"".join(parts)
        self._rest = whole[n:]
        return whole[:n]

    def _read_all(self) -> Iterator[bytes]:
        for at, length in zip(self._extents[::2], self._extents[1::2], strict=True):
            yield _EXTENT.pack(at, length)
            while length:
                data = os.pread(self._file.fileno(), min(length, BLOCK), at)
                data = data or bytes(min(length, BLOCK))
                yield data
                at += len(data)
                length -= len(data)


def unpack(content: IO[bytes], left: int, file_size: int, fd: int) -> None:
    """Write the content of an entry with holes, ``left`` bytes, into the empty file ``fd``.

    Raises ValueError if the content is malformed; writes nothing beyond ``file_size``.
    """
    if not 0 <= file_size < _FAR:
        raise ValueError(f"file size {file_size} is invalid")
    end = 0
    while left:
        at, length = _EXTENT.unpack(_exactly(content, _EXTENT.size))
        left -= _EXTENT.size + length
        if not end <= at < at + length <= file_size or left < 0:
            raise ValueError(
                f"data at {at} ({length} bytes) exceeds the file size {file_size}, or begins before"
                f" {end}"
            )
        end = at + length
        while at < end:
            data = _exactly(content, min(end - at, BLOCK))
            while data:
                written = os.pwrite(fd, data, at)
                data, at = data[written:], at + written
    os.ftruncate(fd, file_size)


def _exactly(content: IO[bytes], size: int) -> bytes:
    data = content.read(size)
    if len(data) != size:
        raise ValueError(f"only {len(data)} of {size} bytes of a file with holes came")
    return data
