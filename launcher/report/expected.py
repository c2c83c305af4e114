# SPDX-License-Identifier: Apache-2.0
"""A predicted downtime, part by part, and the measured one once the move is over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedPart:
    """One part, in seconds and bytes. ``predicted_s`` None: not predicted; ``seen_s`` None: not
    over yet."""

    name: str
    predicted_s: float | None
    seen_s: float | None = None
    bytes: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """The downtime of a move, from the first closed gate to the first task that runs again.

    ``way``: "pre-copy" or "full dump"; ``why``: the reason for a full dump. ``learnt``: the number
    of earlier moves that the prediction rests on. ``left_out`` names what ``predicted_s`` does not
    count.
    """

    way: str
    why: str
    predicted_s: float
    seen_s: float | None
    parts: tuple[ExpectedPart, ...]
    learnt: int
    left_out: str = ""

    @property
    def by(self) -> str:
        """Name the way, for people: ``pre-copy``, ``full dump: the kernel is too old``."""
        return f"{self.way}: {self.why}" if self.why else self.way

    @property
    def grounds(self) -> str:
        """Say what the prediction rests on, for people: defaults, or earlier moves."""
        if not self.learnt:
            return "defaults: no similar move yet"
        return f"learnt from {self.learnt} earlier move{'s' if self.learnt > 1 else ''}"
