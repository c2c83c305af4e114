# SPDX-License-Identifier: Apache-2.0
"""The timeline of a migration: its phases, its downtime, and how many bytes were sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..messages import MigrationRow, Phase


@dataclass
class Timeline:
    """The times of one migration: monotonic seconds; phases count from ``began``."""

    began: float = field(default_factory=time.monotonic)
    asked: float = field(default_factory=time.time)  # seconds since the epoch
    ended: float | None = None
    phases: list[Phase] = field(default_factory=list)
    frozen_at: float | None = None
    frozen_s: float = 0.0
    expected_bytes: int = 0
    image_bytes: int = 0
    bytes: int = 0
    ship_s: float = 0.0

    @classmethod
    def of(cls, row: MigrationRow) -> Timeline:
        """The timeline that an earlier orchestrator recorded. The time since then counts too."""
        ago = max(row.seconds, time.time() - row.asked)  # the clock may have been set back
        found = cls(time.monotonic() - ago, row.asked, None, list(row.phases))
        found.expected_bytes, found.image_bytes = row.expected_bytes, row.image_bytes
        if row.frozen_s:
            found.frozen_at = found.began + row.seconds - row.frozen_s
        return found

    def freeze(self) -> float:
        """The job is frozen from now on; return this moment."""
        self.frozen_at = time.monotonic()
        return self.frozen_at

    def thaw(self) -> None:
        """The job goes on. May be called again."""
        if self.frozen_at is not None:
            self.frozen_s = time.monotonic() - self.frozen_at
            self.frozen_at = None

    def end(self) -> None:
        self.ended = time.monotonic()

    def shipped(self, image_bytes: int) -> None:
        """The image is complete: note its size, and how long the job was frozen for it."""
        self.image_bytes = image_bytes
        if self.frozen_at is not None:
            self.ship_s = time.monotonic() - self.frozen_at

    @contextlib.contextmanager
    def phase(self, name: str, frozen: bool = False) -> Iterator[list[str]]:
        """Measure one phase. The texts that the caller puts into the list become its detail."""
        start, detail = time.monotonic(), list[str]()
        try:
            yield detail
        finally:
            seconds = time.monotonic() - start
            self.phases.append(
                Phase(name, start - self.began, seconds, None, frozen, ", ".join(detail))
            )

    def add(self, phases: list[Phase], since: float) -> None:
        """Add phases that an agent measured. ``since``: when it was asked, on this clock."""
        offset = since - self.began
        self.phases += [
            Phase(p.name, p.start + offset, p.seconds, p.bytes, p.frozen, p.detail) for p in phases
        ]

    def answered(self, phases: list[Phase], since: float, by: str) -> None:
        """Like :meth:`add`, but the agent has just answered. The rest of the time counts as the
        phase "messages": order and answer, their decoding, and waking the tasks that wait."""
        self.add(phases, since)
        taken = max((p.start + p.seconds for p in phases), default=0.0)
        start = since - self.began + taken
        left = max(0.0, time.monotonic() - self.began - start)
        self.phases.append(Phase("messages", start, left, None, True, f"order to {by}, its answer"))

    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def frozen_seconds(self) -> float:
        """Seconds that the job was frozen, up to now if it still is."""
        if self.frozen_at is None:
            return self.frozen_s
        return (self.ended or time.monotonic()) - self.frozen_at

    def link_rate(self) -> float:
        """Bytes per second of the image; 0 if it was not sent."""
        return self.image_bytes / self.ship_s if self.ship_s else 0.0
