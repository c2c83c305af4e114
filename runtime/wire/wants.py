# SPDX-License-Identifier: Apache-2.0
"""The answer to a question of the stream ``wants``: the pages that the source must send after all.

It holds the question's number (64 bits), then for each run of pages: inner pid, pages (32 bits
each) and address (64 bits), little endian. An answer is at most one chunk long. The source asks
again for the rest.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable

from ...errors import LiveshiftError
from .header import CHUNK

_NUMBER, _RUN = struct.Struct("<Q"), struct.Struct("<IIQ")
MOST = (CHUNK - _NUMBER.size) // _RUN.size
PAGE, ADDRESS_END = 4096, 1 << 47
PAGES = 1 << 19
"""One answer asks for at most this many pages: 2 GiB."""

Wants = list[tuple[int, int, int]]
"""A list of runs of pages: (inner pid, address, pages)."""


def pack_wants(number: int, wants: Iterable[tuple[int, int, int]]) -> bytes:
    """Pack as many of the runs, from the first on, as fit into one answer."""
    packed, left = [_NUMBER.pack(number)], PAGES
    for pid, address, pages in itertools.islice(wants, MOST):
        packed.append(_RUN.pack(pid, min(pages, left), address))
        left -= min(pages, left)
        if not left:
            break
    return b"".join(packed)


def number_of(raw: bytes) -> int:
    """The number of the question that these bytes answer; -1 for bytes that are no answer."""
    return int(_NUMBER.unpack_from(raw)[0]) if len(raw) >= _NUMBER.size else -1


def read_wants(raw: bytes) -> Wants:
    """Unpack an answer; raises LiveshiftError for bytes that are no answer."""
    runs = memoryview(raw)[_NUMBER.size :]
    if len(raw) < _NUMBER.size or len(runs) % _RUN.size:
        raise LiveshiftError(f"{len(raw)} bytes are not an answer that names pages")
    found = [(pid, address, pages) for pid, pages, address in _RUN.iter_unpack(runs)]
    for pid, address, pages in found:
        if address % PAGE or not 0 < pages <= (ADDRESS_END - address) // PAGE:
            raise LiveshiftError(
                f"an answer names invalid pages: {pages} of process {pid} at {address:#x}"
            )
    if sum(pages for _, _, pages in found) > PAGES:
        raise LiveshiftError(f"an answer names more than {PAGES} pages")
    return found
