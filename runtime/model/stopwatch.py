# SPDX-License-Identifier: Apache-2.0
"""Times the phases of one side of a migration, for the table that ends it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..messages import Phase


@dataclass
class Lap:
    """Filled in by the phase while it runs."""

    bytes: int | None = None
    detail: str = ""


@dataclass
class Stopwatch:
    """Phases in order; ``start`` of each counts from the stopwatch's own beginning."""

    began: float = field(default_factory=time.monotonic)
    phases: list[Phase] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str, *, frozen: bool = False) -> Iterator[Lap]:
        """While the job stands, a phase begins where the one before it has ended: what lies
        between two, such as the way to another thread, is the later one's."""
        lap = Lap()
        start = time.monotonic()
        if frozen:
            before = max((p.start + p.seconds for p in self.phases), default=0.0)
            start = min(start, self.began + before)
        try:
            yield lap
        finally:
            seconds = time.monotonic() - start
            self.phases.append(
                Phase(name, start - self.began, seconds, lap.bytes, frozen, lap.detail)
            )
