# SPDX-License-Identifier: Apache-2.0
"""Has CRIU restore the pages of its own images at once, also where others are filled in.

A dump marks all that could be restored lazily, and ``criu restore --lazy-pages`` then leaves it to
the lazy-pages daemon, though it lies in the image (criu: mem.c, restore_priv_vma_content). We have
only what CRIU was kept from dumping; for the rest the mark has to go.
"""

from __future__ import annotations

from pathlib import Path

from ....errors import StepFailed
from ..store import store_library


def restore_at_once(images: Path) -> None:
    """Take the mark from every pagemap image; raises StepFailed. May be done again."""
    ffi, calls = store_library.load()
    for path in sorted(images.glob("pagemap-[0-9]*.img")):
        before = path.read_bytes()
        raw = bytearray(before)
        if calls.eager_pagemap(ffi.from_buffer("uint8_t[]", raw), len(raw)) != 0:
            raise StepFailed("restore", f"{path.name} is damaged")
        if raw != before:
            path.write_bytes(raw)
