# SPDX-License-Identifier: Apache-2.0
"""Makes CRIU restore the pages of its own images at once, beside the fill of all other pages.

A dump marks all pages that could be restored lazily. ``criu restore --lazy-pages`` then leaves them
to the lazy-pages daemon, although they lie in the image (criu: mem.c, restore_priv_vma_content).
Our fill has only the pages that the page filter hid from the dump, so we remove the mark from the
pages in the image.
"""

from __future__ import annotations

from pathlib import Path

from ....errors import StepFailed
from ..store import store_library


def clear_lazy_flags(images: Path) -> None:
    """Remove the mark in every pagemap image. Raises StepFailed. A second call does no harm."""
    ffi, calls = store_library.load()
    for path in sorted(images.glob("pagemap-[0-9]*.img")):
        before = path.read_bytes()
        raw = bytearray(before)
        if calls.pagemap_clear_lazy(ffi.from_buffer("uint8_t[]", raw), len(raw)) != 0:
            raise StepFailed("restore", f"{path.name} is damaged")
        if raw != before:
            path.write_bytes(raw)
