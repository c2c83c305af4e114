# SPDX-License-Identifier: Apache-2.0
"""What the inbox calls when pages of memory come, so that some are in place before the restore."""

from __future__ import annotations

from typing import Protocol

from ....criu_glue.memory.store.store import MemoryStore


class PagesAhead(Protocol):
    """Puts pages in place before the image is complete (memory_ahead.py)."""

    def begin(self, store: MemoryStore, *, trains: bool) -> None:
        """The first pages have come. ``trains``: while the job trains."""

    def halt(self) -> None:
        """CRIU's images begin to come: the tree is frozen at its source."""

    @property
    def lost(self) -> str:
        """Why pages that came are lost, in words; "" if they are not."""


class NothingAhead:
    """Puts nothing in place."""

    lost = ""

    def begin(self, store: MemoryStore, *, trains: bool) -> None:
        pass

    def halt(self) -> None:
        pass
