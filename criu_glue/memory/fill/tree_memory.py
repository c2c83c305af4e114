# SPDX-License-Identifier: Apache-2.0
"""The memory of a restored tree that is not in CRIU's images: from the restore to its last page.

A mark lies in the images' directory as long as not all of the memory is in its place. By it an
agent that was started anew knows that the tree must not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ....errors import StepFailed
from .eager import restore_at_once
from .fill import FAILED, FillEngine

UNFILLED = "unfilled"

ENDS_S = 0.5
"""A CRIU that fails, and its fill with it, ends within this, and then it says why by itself."""


class TreeMemory:
    """Of one attempt at a time to restore the tree from ``images``."""

    def __init__(self, images: Path) -> None:
        self._images = images
        self._mark = images / UNFILLED
        self._fill: FillEngine | None = None
        self._failed_since = 0.0

    def begin(self, fill: FillEngine | None) -> list[str]:
        """CRIU is about to restore; returns the options that it needs. Raises StepFailed, OSError;
        ``fill`` is closed by :meth:`end` then, too."""
        self._mark.unlink(missing_ok=True)
        if fill is None:
            return []
        self._fill = fill
        self._mark.touch()
        restore_at_once(self._images)
        return ["--lazy-pages"]

    def look(self) -> None:
        """CRIU restores. Raises StepFailed when it waits for memory that will not come."""
        if self._fill is None or (seen := self._fill.seen()).phase != FAILED:
            return
        self._failed_since = self._failed_since or time.monotonic()
        if time.monotonic() - self._failed_since > ENDS_S:
            raise StepFailed("restore", f"memory could not be filled: {seen.why}")

    def wait(self, until: float, check: Callable[[], object] = lambda: None) -> None:
        """CRIU waits in its hook. Return once all is there and ``check`` has not raised; raises
        StepFailed."""
        if self._fill is not None:
            self._fill.wait(until)
            check()
            self._mark.unlink()

    def lacking(self) -> str:
        """Why the tree must not go on; "" when it may."""
        return "its memory was not filled when the agent ended" if self._mark.exists() else ""

    def end(self) -> None:
        """Let go of everything; the tree has ended or needs nothing more. May be called again."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill.close()
