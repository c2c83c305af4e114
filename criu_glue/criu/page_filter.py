# SPDX-License-Identifier: Apache-2.0
"""Keep CRIU from dumping pages that travel another way; see page_filter.c, which CRIU preloads.

CRIU looks for pages only once every task stands still. Before its first look it waits for
:meth:`PageFilter.hide`, so that the ranges can be listed of tasks that no longer change them. A
range that is hidden has no content in the image: what lies in it must come to the destination
otherwise. Where the filter does nothing (another CRIU, no ``hide`` in time) the image has it all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

PATIENCE_S = 10.0
"""How long CRIU waits for the ranges, its tasks standing still, before it dumps everything."""

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Parts of address spaces, [start, end) in bytes, by the pid that a task has in its capsule."""


class PageFilter:
    """One dump's; ``directory`` is the one that CRIU's images lie in."""

    def __init__(self, directory: Path, patience_s: float = PATIENCE_S) -> None:
        self._directory = directory
        self._patience_s = patience_s
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("hide", "hidden", "asked"):  # of an earlier dump
            (directory / name).unlink(missing_ok=True)

    @property
    def library(self) -> Path:
        """What CRIU is to preload."""
        return Path(str(files(__package__) / "page_filter_shim.so"))

    def environment(self, directory: int) -> dict[str, str]:
        """What tells the library where to look: CRIU is given the directory as a descriptor."""
        return {"LIVESHIFT_PAGE_FILTER": f"{directory}:{int(self._patience_s * 1000)}"}

    def hide(self, ranges: Ranges) -> None:
        """Hide what lies in these; ``{}``: CRIU is to dump everything, without further waiting."""
        lines = (
            f"{pid} {start:x} {end:x}\n" for pid, of in ranges.items() for start, end in of
        )  # fmt: skip
        unfinished = self._directory / "hide.new"
        unfinished.write_text("".join(lines))
        os.rename(unfinished, self._directory / "hide")

    def asked(self) -> bool:
        """Whether CRIU waits for the ranges: it has stopped every task then."""
        return (self._directory / "asked").exists()

    def hidden(self) -> int:
        """Bytes of address space that CRIU was told to hold no pages; 0: it dumped everything."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self._directory / "hidden").read_text())
        return 0
