# SPDX-License-Identifier: Apache-2.0
"""The data of a report, and the numbers that follow from it.

A report compares two runs of the same job: an undisturbed reference, and a run that was moved. Its
claims (``bit_identical``, the counts, the differences) are computed here from the losses and the
digests, and never handed in. Times are seconds, instants are seconds since the epoch, sizes are
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from . import gaps
from .expected import Expected

if TYPE_CHECKING:
    from ...runtime.messages import Phase


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """One optimiser step of one rank: its loss, when it ended, and the host where it ended."""

    step: int
    loss: float
    time: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class RankRun:
    """All steps of one rank in one run, and the SHA-256 of its parameters at the end."""

    rank: int
    steps: tuple[ReportedStep, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class ReportedMigration:
    """One capsule's move: why, from where to where, and how long each phase took."""

    capsule: str
    source: str
    destination: str
    reason: str
    epoch: int
    requested_at: float
    started_at: float
    phases: tuple[Phase, ...]
    unaccounted_s: float  # time between start and end that no phase covers
    image_bytes: int  # sent while the job was frozen
    ahead_bytes: int = 0  # memory sent before the freeze; some of it more than once
    link_rate: float | None = None  # bytes per second while the image crossed the link
    ranks: tuple[int, ...] = ()
    committed: bool = True
    lost_s: float | None = None  # training time, with the pause; None: not measured
    cost: str = ""  # a line about it, or why it was not measured; "": not known
    expected: Expected | None = None  # None: nothing was predicted, or the job was not stopped

    @property
    def frozen_s(self) -> float:
        """Seconds that the phases with a frozen job cover; overlaps count once."""
        return covered(p for p in self.phases if p.frozen)

    @property
    def freeze(self) -> tuple[float, float] | None:
        """When the freeze began and ended, in seconds since the epoch; None: there was none."""
        whole = gaps.freeze(self.phases)
        return (self.started_at + whole[0], self.started_at + whole[1]) if whole else None

    @property
    def total_s(self) -> float:
        """Seconds from start to end: what the phases cover, and what none of them covers."""
        return covered(self.phases) + self.unaccounted_s


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    """How one rank of the moved run compares with the same rank of the reference."""

    rank: int
    steps: int  # steps that occur in either run
    equal: int  # steps whose losses are the same float, bit for bit
    first_difference: int | None
    max_difference: float
    sha256_equal: bool

    @property
    def identical(self) -> bool:
        return self.steps > 0 and self.equal == self.steps and self.sha256_equal


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between the ends of two consecutive steps of a rank; ``step`` is the later one."""

    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class DowntimeReport:
    """Two runs of one job side by side, and the migration that happened in the second."""

    title: str
    command: str
    reference: tuple[RankRun, ...]
    moved: tuple[RankRun, ...]
    move: ReportedMigration
    environment: Mapping[str, str] = field(default_factory=dict)
    outcome: str = ""
    reproduce: tuple[str, ...] = ("make demo",)

    @property
    def verdicts(self) -> tuple[ReportVerdict, ...]:
        """One per rank that occurs in either run. A rank that is missing in one run differs."""
        left = {run.rank: run for run in self.reference}
        right = {run.rank: run for run in self.moved}
        return tuple(
            compare(left.get(r, RankRun(r, (), "")), right.get(r, RankRun(r, (), "")))
            for r in sorted(left.keys() | right.keys())
        )

    @property
    def bit_identical(self) -> bool:
        """Whether every loss and every digest of the moved run equals the reference's."""
        return bool(self.verdicts) and all(v.identical for v in self.verdicts)

    @property
    def steps(self) -> int:
        return max((v.steps for v in self.verdicts), default=0)

    @property
    def median_step_s(self) -> float:
        """The median step of the moved run, over all ranks; 0 if no rank made two steps."""
        lengths = [gap.seconds for run in self.moved for gap in gaps_of(run)]
        return median(lengths) if lengths else 0.0

    @property
    def moved_ranks(self) -> tuple[RankRun, ...]:
        """The ranks of the moved run that the migration moved."""
        return tuple(run for run in self.moved if run.rank in self.move.ranks)

    @property
    def gap(self) -> Gap | None:
        """The gap between two steps of a moved rank that contains the freeze. If several ranks were
        moved, it is the longest of their gaps. None: no gap contains it."""
        if (moment := gaps.held_at(self.move.phases)) is None:
            return None
        found = []
        for run in self.moved_ranks:
            n = gaps.holding([s.time for s in run.steps], self.move.started_at + moment)
            found += [gaps_of(run)[n - 1]] if n else []
        return max(found, key=lambda gap: gap.seconds, default=None)

    @property
    def downtime_s(self) -> float | None:
        """The seconds from one step of the moved rank to its next, around the freeze; None if no
        gap between steps contains the freeze."""
        gap = self.gap
        return gap.seconds if gap else None


def compare(reference: RankRun, moved: RankRun) -> ReportVerdict:
    """Compare two runs of one rank, step by step and bit by bit."""
    left = {s.step: s.loss for s in reference.steps}
    right = {s.step: s.loss for s in moved.steps}
    every = sorted(left.keys() | right.keys())
    # Unlike ==, float.hex distinguishes -0.0 from 0.0 and takes a NaN for equal to itself.
    unequal = [
        n for n in every if n not in left or n not in right or left[n].hex() != right[n].hex()
    ]
    return ReportVerdict(
        rank=moved.rank,
        steps=len(every),
        equal=len(every) - len(unequal),
        first_difference=unequal[0] if unequal else None,
        max_difference=max((difference(left.get(n), right.get(n)) for n in unequal), default=0.0),
        sha256_equal=bool(reference.sha256) and reference.sha256 == moved.sha256,
    )


def difference(reference: float | None, moved: float | None) -> float:
    """Return the distance of two losses; infinite if one is missing or is not a number."""
    if reference is None or moved is None:
        return math.inf
    distance = abs(moved - reference)
    return math.inf if math.isnan(distance) else distance


def covered(phases: Iterable[Phase]) -> float:
    """Return the length of the union of the phases' intervals: parallel phases count once."""
    total, end = 0.0, -math.inf
    for phase in sorted(phases, key=lambda p: p.start):
        stop = phase.start + phase.seconds
        total += max(0.0, stop - max(phase.start, end))
        end = max(end, stop)
    return total


def gaps_of(run: RankRun) -> list[Gap]:
    """Return the times from one step's end to the next, in order."""
    pairs = zip(run.steps, run.steps[1:], strict=False)
    return [Gap(after.step, before.time, after.time) for before, after in pairs]
