# SPDX-License-Identifier: Apache-2.0
"""Compression of chunks of memory by zstd, where that is quicker than to send them as they are."""

from __future__ import annotations

import time

import zstandard

from ...errors import LiveshiftError
from ..config.choices import Compress
from .header import CHUNK

LEVEL = 1
"""The quickest level of zstd that also shrinks numbers. A training job's memory is mostly numbers.
Methods that only look for repeated bytes (lz4, zstd's negative levels) do not shrink them."""

TRY_EACH = 64
"""While compression does not pay, the compressor tries it again on one of this many chunks."""

WORTH = 0.95
"""A chunk is sent compressed only if that makes it at most this share of its size."""


class Compressor:
    """Compresses chunks or not. It decides by its own measured speed and gain."""

    def __init__(self, mode: Compress) -> None:
        self._mode = mode
        self._zstd = zstandard.ZstdCompressor(level=LEVEL)
        self._seen = 0
        self._speed = 0.0  # bytes of input per second
        self._share = 1.0  # bytes of output per byte of input

    def squeeze(self, data: bytes | memoryview, link_rate: float) -> tuple[bytes | memoryview, int]:
        """Return the bytes to send, and the header's ``raw``.

        ``link_rate``: bytes per second that the lanes carry; 0.0 while that is not known, or while
        something else than the link limits the chunks.
        """
        self._seen += 1
        if not self._wanted(link_rate):
            return data, 0
        begin = time.monotonic()
        small = self._zstd.compress(data)
        speed = len(data) / max(time.monotonic() - begin, 1e-6)
        self._speed = (self._speed + speed) / 2 if self._speed else speed
        self._share = (self._share + len(small) / len(data)) / 2
        if len(small) > WORTH * len(data):
            return data, 0
        return small, len(data)

    def _wanted(self, link_rate: float) -> bool:
        if self._mode is not Compress.AUTO:
            return self._mode is Compress.ALWAYS
        if not link_rate:
            return False
        if self._speed and (link_rate > self._speed or self._share > WORTH):
            return self._seen % TRY_EACH == 0
        return True


def restore(data: memoryview, raw: int) -> memoryview:
    """Return the ``raw`` bytes that :meth:`Compressor.squeeze` was given.

    Raises LiveshiftError when the data does not hold exactly ``raw`` bytes. It never writes more
    than one chunk, whatever size a peer states.
    """
    try:
        size = zstandard.frame_content_size(data)
        if size != raw or not len(data) < raw <= CHUNK:
            raise LiveshiftError(
                f"a chunk of {len(data)} bytes holds {size}, not {raw}, once decompressed"
            )
        whole = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise LiveshiftError(f"a chunk cannot be decompressed: {error}") from error
    if len(whole) != raw:
        raise LiveshiftError(f"a chunk holds {len(whole)} bytes, but its header states {raw}")
    return memoryview(whole)
