# SPDX-License-Identifier: Apache-2.0
"""The memory of a restored tree that is not in CRIU's images: from the restore to its last page.

A mark in the images' directory lies there as long as it is not all in its place. By it an agent
that was started anew knows that the tree must not run, or, if it was to run before, that it ended
with the agent that filled it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import StepFailed
from .eager import restore_at_once
from .fill import FAILED, FillEngine

log = logging.getLogger("liveshift.memory")

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
        self._lock = threading.Lock()

    def begin(self, fill: FillEngine | None, init: int) -> list[str]:
        """CRIU is about to restore into the room whose process 1 is ``init``; returns the options
        that it needs. Raises StepFailed, OSError; ``fill`` is closed by :meth:`end` then, too."""
        self._mark.unlink(missing_ok=True)
        if fill is None:
            return []
        self._fill = fill
        self._mark.touch()
        restore_at_once(self._images)
        if fill.post_copy:
            fill.stand_by(init)
        return ["--lazy-pages"]

    def look(self) -> None:
        """CRIU restores. Raises StepFailed when it waits for memory that will not come."""
        if self._fill is None or (seen := self._fill.seen()).phase != FAILED:
            return
        self._failed_since = self._failed_since or time.monotonic()
        if time.monotonic() - self._failed_since > ENDS_S:
            raise StepFailed("restore", f"memory could not be filled: {seen.why}")

    def wait(self, until: float, check: Callable[[], object] = lambda: None) -> None:
        """CRIU waits in its hook. Return once all is there, or, where the tree may run before,
        all that there is to be is known, and ``check`` has not raised; raises StepFailed."""
        if self._fill is not None:
            self._fill.wait(until)
            check()
            if not self._fill.post_copy:
                self._mark.unlink()

    def lacking(self) -> str:
        """Why the tree must not go on; "" when it may."""
        if not self._mark.exists():
            return ""
        if self._fill is None:
            return "its memory was not filled when the agent ended"
        seen = self._fill.seen()
        if seen.phase == FAILED:
            return f"memory could not be filled: {seen.why}"
        return "" if self._fill.post_copy else "its memory was not filled"

    @property
    def filling(self) -> bool:
        """Whether some of it may not be in its place yet, and this process sees to it."""
        return self._fill is not None

    def at_door(self) -> None:
        """CRIU has left; the tree stands, and is let go later."""
        if self._fill is not None and not self._fill.post_copy:
            self.end()

    def let_go(self, end_tree: Callable[[], object]) -> None:
        """The tree goes on. Where not all is there yet that is seen to from now on, and the tree is
        ended if it fails."""
        fill = self._fill
        if fill is None or not fill.post_copy:
            self.end()
        else:
            threading.Thread(
                target=self._see_through, args=(fill, end_tree), name="memory-fill", daemon=True
            ).start()

    def end(self) -> None:
        """Let go of everything; the tree has ended or needs nothing more. May be called again."""
        with self._lock:
            fill, self._fill = self._fill, None
        if fill is not None:
            fill.close()

    def _see_through(self, fill: FillEngine, end_tree: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            seen = fill.wait_finished(math.inf)
            self._mark.unlink(missing_ok=True)
            took = time.monotonic() - began
            log.info("%d bytes of memory were filled, in %.3f s of its run", seen.bytes, took)
        except StepFailed as error:
            if self._fill is fill:  # else it was ended on purpose
                log.error("a tree is ended that runs without all of its memory: %s", error)
                end_tree()
        finally:
            self.end()
