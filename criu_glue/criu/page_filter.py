# SPDX-License-Identifier: Apache-2.0
"""The page filter: keeps CRIU from dumping the memory that the tracker carries (page_filter.c).

CRIU scans for pages only once every task is stopped. Before its first scan the filter, which CRIU
preloads, waits for :meth:`PageFilter.hide`. So the ranges can be listed when the tasks no longer
change them. A hidden range has no content in the image, so its pages must reach the destination in
another way. If the filter does nothing (another CRIU, no ``hide`` in time), the image has all
pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

PATIENCE_S = 10.0
"""CRIU waits this many seconds for the ranges, with its tasks stopped, then it dumps everything."""

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""The capsule's pid of a task → ranges of its address space, [start, end) in bytes."""


class PageFilter:
    """The page filter of one dump; ``directory`` is the one in which CRIU's images lie."""

    def __init__(self, directory: Path, patience_s: float = PATIENCE_S) -> None:
        self._directory = directory
        self._patience_s = patience_s
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("hide", "asked"):  # left over from an earlier dump
            (directory / name).unlink(missing_ok=True)

    @property
    def library(self) -> Path:
        """The library that CRIU must preload."""
        return Path(str(files(__package__) / "page_filter_shim.so"))

    def environment(self, directory: int) -> dict[str, str]:
        """The variable that tells the library where to look.

        ``directory`` is the number of the descriptor under which CRIU has the directory open."""
        return {"LIVESHIFT_PAGE_FILTER": f"{directory}:{int(self._patience_s * 1000)}"}

    def hide(self, ranges: Ranges) -> None:
        """Hide the pages of these ranges; with ``{}`` CRIU waits no longer and dumps everything."""
        lines = (f"{pid} {start:x} {end:x}\n" for pid, of in ranges.items() for start, end in of)
        unfinished = self._directory / "hide.new"
        unfinished.write_text("".join(lines))
        os.rename(unfinished, self._directory / "hide")

    def asked(self) -> bool:
        """True if CRIU waits for the ranges; it has stopped every task by then."""
        return (self._directory / "asked").exists()
