# SPDX-License-Identifier: Apache-2.0
"""What a report is made of, and the numbers that follow from it.

A report compares two runs of the same job: a reference nobody touched, and a run that was moved.
What is claimed (``bit_identical``, the counts, the differences) is computed here from the losses
and the digests, never handed in. Times are seconds, instants are seconds since the epoch, sizes
are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from . import gaps
from .expected import Expected


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of one rank: its loss, when it ended, and the host it ended on."""

    step: int
    loss: float
    time: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class RankRun:
    """All steps of one rank in one run, and the SHA-256 of its parameters at the end."""

    rank: int
    steps: tuple[Step, ...]
    sha256: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts it ran on, in order; a host it came back to is named again."""
        seen: list[str] = []
        for step in self.steps:
            if step.host and (not seen or seen[-1] != step.host):
                seen.append(step.host)
        return tuple(seen)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a migration; ``start`` counts from the migration's ``started_at``."""

    name: str
    seconds: float
    start: float
    bytes: int | None = None
    frozen: bool = False  # whether the job stood still in it
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Migration:
    """One capsule's move: who asked, where to, how long each phase took."""

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
    ahead_bytes: int = 0  # memory sent before, while it trained; some of it more than once
    link_rate: float | None = None  # bytes per second while the image crossed the link
    ranks: tuple[int, ...] = ()
    committed: bool = True  # False: it failed before the commit, the capsule never left
    lost_s: float | None = None  # of training, the pause with it; None: not measured
    cost: str = ""  # the same in words, or why it was not measured; empty: nobody says
    expected: Expected | None = None  # None: nothing was predicted, or the job never stood

    @property
    def frozen_s(self) -> float:
        """Time covered by phases in which the job was frozen; overlaps count once."""
        return covered(p for p in self.phases if p.frozen)

    @property
    def freeze(self) -> tuple[float, float] | None:
        """Since when and until when the job was frozen; None: it never was."""
        whole = gaps.freeze(self.phases)
        return (self.started_at + whole[0], self.started_at + whole[1]) if whole else None

    @property
    def total_s(self) -> float:
        """Start to end: what the phases cover, and what none of them does."""
        return covered(self.phases) + self.unaccounted_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one rank of the moved run compares with the same rank of the reference."""

    rank: int
    steps: int  # steps in the longer of the two runs
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
class Report:
    """Two runs of one job side by side, and the migrations that happened in the second."""

    title: str
    command: str
    reference: tuple[RankRun, ...]
    moved: tuple[RankRun, ...]
    migrations: tuple[Migration, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    outcome: str = ""
    reproduce: tuple[str, ...] = ("make demo",)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One per rank that occurs in either run; a rank that is missing in one differs."""
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
        """The moved run's median step, over all ranks; 0 when no rank made two steps."""
        return median_step(self.moved)

    @property
    def principal(self) -> Migration | None:
        """The migration with the longest downtime: the one that the headline speaks of."""
        return max(self.migrations, key=lambda m: self.downtime_s(m) or 0.0, default=None)

    def moved_by(self, migration: Migration) -> tuple[RankRun, ...]:
        """The ranks of the moved run that a migration took along."""
        return tuple(run for run in self.moved if run.rank in migration.ranks)

    def gap_of(self, migration: Migration) -> Gap | None:
        """The gap between two steps of a moved rank that holds the freeze; the longest of them
        where several ranks were moved. None: no gap holds it."""
        if (moment := gaps.held_at(migration.phases)) is None:
            return None
        found = []
        for run in self.moved_by(migration):
            n = gaps.holding([s.time for s in run.steps], migration.started_at + moment)
            found += [gaps_of(run)[n - 1]] if n else []
        return max(found, key=lambda gap: gap.seconds, default=None)

    def downtime_s(self, migration: Migration) -> float | None:
        """Seconds from one step of the moved rank to its next; None where no gap between steps
        holds the freeze."""
        gap = self.gap_of(migration)
        return gap.seconds if gap else None


def compare(reference: RankRun, moved: RankRun) -> Verdict:
    """Hold two runs of one rank against each other, step by step and bit by bit."""
    left = {s.step: s.loss for s in reference.steps}
    right = {s.step: s.loss for s in moved.steps}
    every = sorted(left.keys() | right.keys())
    # float.hex tells -0.0 from 0.0 and takes a NaN for equal to itself, which == does not.
    unequal = [
        n for n in every if n not in left or n not in right or left[n].hex() != right[n].hex()
    ]
    return Verdict(
        rank=moved.rank,
        steps=len(every),
        equal=len(every) - len(unequal),
        first_difference=unequal[0] if unequal else None,
        max_difference=max((difference(left.get(n), right.get(n)) for n in unequal), default=0.0),
        sha256_equal=bool(reference.sha256) and reference.sha256 == moved.sha256,
    )


def difference(reference: float | None, moved: float | None) -> float:
    """The distance of two losses; infinite when one is missing or is not a number."""
    if reference is None or moved is None:
        return math.inf
    distance = abs(moved - reference)
    return math.inf if math.isnan(distance) else distance


def covered(phases: Iterable[Phase]) -> float:
    """The length of the union of some phases' intervals: parallel phases count once."""
    total, end = 0.0, -math.inf
    for phase in sorted(phases, key=lambda p: p.start):
        stop = phase.start + phase.seconds
        total += max(0.0, stop - max(phase.start, end))
        end = max(end, stop)
    return total


def median_step(runs: Iterable[RankRun]) -> float:
    """The median time between two consecutive steps over some ranks; 0 when there is none."""
    gaps = [gap.seconds for run in runs for gap in gaps_of(run)]
    return median(gaps) if gaps else 0.0


def gaps_of(run: RankRun) -> list[Gap]:
    """The times from one step's end to the next, in order."""
    pairs = zip(run.steps, run.steps[1:], strict=False)
    return [Gap(after.step, before.time, after.time) for before, after in pairs]
