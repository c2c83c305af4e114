# SPDX-License-Identifier: Apache-2.0
"""Follows the fill of a tree that CRIU restores, from CRIU's start to the last page.

A mark file lies in the directory of the images until all memory is in its place. An agent that was
restarted sees by it that the tree must not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ....errors import StepFailed
from ..store import store_library
from .fill import FAILED, FillEngine

UNFILLED = "unfilled"

ENDS_S = 0.5
"""A CRIU that fails makes its fill fail, too. It ends within this many seconds, and its own error
then says why. So a failed fill is reported only after this time."""


class TreeMemory:
    """The fill for attempts to restore the tree from ``images``, one attempt at a time."""

    def __init__(self, images: Path) -> None:
        self._images = images
        self._mark = images / UNFILLED
        self._fill: FillEngine | None = None
        self._failed_since = 0.0

    def begin(self, fill: FillEngine | None) -> list[str]:
        """Prepare a restore and return the options that CRIU needs. Raises StepFailed or OSError.
        :meth:`end` closes ``fill``, also after an error."""
        self._mark.unlink(missing_ok=True)
        if fill is None:
            return []
        self._fill = fill
        self._mark.touch()
        self._clear_lazy_flags()
        return ["--lazy-pages"]

    def _clear_lazy_flags(self) -> None:
        """Make CRIU restore the pages of its own images at once. Raises StepFailed.

        A dump marks all pages that could be restored lazily. ``criu restore --lazy-pages`` then
        leaves them to the lazy-pages daemon, although they lie in the image (criu: mem.c,
        restore_priv_vma_content). The fill has only the pages that the page filter hid from the
        dump, so this removes the mark from the pages in the image. A second call does no harm."""
        ffi, calls = store_library.load()
        for path in sorted(self._images.glob("pagemap-[0-9]*.img")):
            before = path.read_bytes()
            raw = bytearray(before)
            if calls.pagemap_clear_lazy(ffi.from_buffer("uint8_t[]", raw), len(raw)) != 0:
                raise StepFailed("restore", f"{path.name} is damaged")
            if raw != before:
                path.write_bytes(raw)

    def check(self) -> None:
        """Call this while CRIU restores. Raises StepFailed when CRIU waits for memory that will not
        come."""
        if self._fill is None or (seen := self._fill.seen()).phase != FAILED:
            return
        self._failed_since = self._failed_since or time.monotonic()
        if time.monotonic() - self._failed_since > ENDS_S:
            raise StepFailed("restore", f"memory could not be filled: {seen.why}")

    def wait(self, until: float, check: Callable[[], object] = lambda: None) -> None:
        """Call this when CRIU waits in its hook. Return once all memory is in place and ``check``
        has passed. Raises StepFailed."""
        if self._fill is not None:
            self._fill.wait(until)
            check()
            self._mark.unlink()

    def lacking(self) -> str:
        """Return why the tree must not go on; "" when it may."""
        return "its memory was not filled when the agent ended" if self._mark.exists() else ""

    def end(self) -> None:
        """Close the fill. The tree has ended or needs it no more. A second call is allowed."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill.close()
