# SPDX-License-Identifier: Apache-2.0
"""Measures the phases of one side of a migration, for the table at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..messages import Phase


@dataclass
class Lap:
    """The size and the detail of one phase. The phase sets them while it runs."""

    bytes: int | None = None
    detail: str = ""


@dataclass
class Stopwatch:
    """Phases in order. The ``start`` of each counts from the beginning of the stopwatch."""

    began: float = field(default_factory=time.monotonic)
    phases: list[Phase] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str, *, frozen: bool = False) -> Iterator[Lap]:
        """Measure one phase. If ``frozen``, it begins where the phase before it ended: time between
        two phases, such as the way to another thread, counts for the later one."""
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
