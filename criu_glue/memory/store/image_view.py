# SPDX-License-Identifier: Apache-2.0
"""One complete image in a store: the one of its newest table, or one of a kept generation."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from ..engine import CHUNK, PAGE
from . import store_library
from .page_table import ProcessTable

_IMAGE_HEAD = struct.Struct("<III4x")
_EXTENT = 16  # bytes of struct extent
_BUFFERS = 8
_MOST = (1 << 64) - 1

Sink = Callable[[memoryview, Callable[[], None]], None]
"""A sink takes a chunk. The chunk belongs to the sink until the sink calls the second argument."""


class ImageView:
    """One image. It can be used only within the ``with`` that yielded it. Its methods block."""

    def __init__(self, store: Any, image: Any, count: int) -> None:
        """``image``: the first of ``count`` structures of ``store``, one for each process."""
        self._ffi, self._calls = store_library.load()
        self._store, self._image, self._count = store, image, count

    @property
    def images(self) -> Sequence[Any]:
        """The C structures (store.h, ``struct image``)."""
        return [self._image[i] for i in range(self._count)]

    @property
    def size(self) -> int:
        """Bytes of memory in the image, pages of zeros included."""
        return sum(int(image.pages) for image in self.images) * PAGE

    @property
    def table(self) -> dict[int, ProcessTable]:
        """The table that the source has sent for this image."""
        found = {}
        for image in self.images:
            packed = self._ffi.new("uint64_t[]", 2 * image.extents + 1)
            runs = self._calls.store_runs(self._ffi.addressof(image), packed)
            found[image.pid] = ProcessTable(
                image.incarnation, bytes(self._ffi.buffer(packed, 16 * runs))
            )
        return found

    def incarnations(self) -> dict[int, int]:
        """Return the incarnation of each process, by inner pid."""
        return {image.pid: image.incarnation for image in self.images}

    def digest(self) -> bytes:
        """Return the digest of all pages (digest.h): 16 bytes. It takes about 0.1 s per GB."""
        sums = self._ffi.new("uint64_t[2]")
        self._calls.store_digest(self._store, self._image, self._count, sums)
        return struct.pack("<QQ", *sums)

    def digest_after(self, before: ImageView, digest: bytes) -> bytes:
        """Return what :meth:`digest` returns, computed from the ``digest`` of another image of the
        same store. The method reads only the pages in which both images differ. Both images must
        be kept generations, because nothing writes into their slots. If a bit has flipped in a page
        that only ``before`` has, the result is wrong."""
        sums = self._ffi.new("uint64_t[2]")
        old = before._image, before._count
        if not self._calls.store_digest_change(self._store, *old, self._image, self._count, sums):
            return self.digest()
        known = struct.unpack("<QQ", digest)
        return struct.pack("<QQ", *(a + b & _MOST for a, b in zip(known, sums, strict=True)))

    def forward(self, sink: Sink) -> None:
        """Give the whole image to ``sink`` as chunks, for another host."""
        free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            free.put(memoryview(bytearray(CHUNK)))
        at = self._ffi.new("struct chunk_cursor *")
        while True:
            buffer = free.get()
            chunk = self._ffi.from_buffer("uint8_t[]", buffer, require_writable=True)
            length = self._calls.store_next_chunk(self._store, self._image, self._count, at, chunk)
            if not length:
                return
            sink(buffer[:length], lambda buffer=buffer: free.put(buffer))  # type: ignore[misc]

    def write(self, file: BinaryIO) -> None:
        """Write where the pages lie in the store, for an index. Raises OSError."""
        for image in self.images:
            file.write(_IMAGE_HEAD.pack(image.pid, image.incarnation, image.extents))
            if image.extents:
                file.write(self._ffi.buffer(image.extent, image.extents * _EXTENT))


def read_images(raw: memoryview, count: int, take: Callable[[int, int, Any, int], None]) -> None:
    """Give each of ``count`` processes in an index to ``take``: pid, incarnation, extents, and how
    many these are. Raises ValueError or struct.error if ``raw`` has not exactly these processes."""
    ffi, _ = store_library.load()
    for _ in range(count):
        pid, incarnation, extents = _IMAGE_HEAD.unpack_from(raw)
        raw = raw[_IMAGE_HEAD.size :]
        if len(raw) < extents * _EXTENT:
            raise ValueError(f"process {pid} is cut off")
        at = ffi.cast("struct extent *", ffi.from_buffer("uint8_t[]", raw))
        take(pid, incarnation, at, extents)
        raw = raw[extents * _EXTENT :]
    if raw:
        raise ValueError(f"{len(raw)} bytes too many")
