# SPDX-License-Identifier: Apache-2.0
"""build/bench-failure.json: what was measured after every case; a run can be resumed.

Seconds and bytes. Times of a kill begin at the cut of the host's power, just before it.
"""

from __future__ import annotations

from statistics import median

import msgspec
from bench_record import ALIKE, Goal, Record, middle

from .cases import Case, Effort
from .failures import Kind
from .history import Loss

FILE = "bench-failure.json"


class Kill(msgspec.Struct, frozen=True):
    """One host that lost its power.

    ``step``, ``rank``: when, and whose host; ``late_s``: how much later, since the job was not
    ready to lose a host. ``noticed_s``: until the loss was acted upon, None where nothing tells.
    ``first_step_s``: until all ranks had made a step again; ``lost_s``: until they had made all
    that they had before, ``repeated`` steps of them again in ``repeated_s``; ``new_step_s``: until
    a step that was not made before.
    """

    step: int
    rank: int
    host: str
    to: str
    late_s: float
    noticed_s: float | None
    first_step_s: float
    lost_s: float
    new_step_s: float
    repeated: int
    repeated_s: float
    told: str = ""


def kill(
    seen: Loss,
    cut: float,
    step: int,
    rank: int,
    host: str,
    to: str,
    late: float,
    noticed: float | None,
    told: str,
) -> Kill:
    """What the records tell of a host. ``cut``, ``noticed``: in seconds since the epoch."""
    return Kill(
        step=step,
        rank=rank,
        host=host,
        to=to,
        late_s=late,
        noticed_s=None if noticed is None else noticed - cut,
        first_step_s=seen.first_step_s,
        lost_s=seen.lost_s,
        new_step_s=seen.new_step_s,
        repeated=seen.repeated,
        repeated_s=seen.lost_s - seen.first_step_s,
        told=told,
    )


class Met(msgspec.Struct, frozen=True):
    """One failure of the schedule. ``gap_s``: since the job was whole. ``lost_s``, ``repeated``: as
    in Kill."""

    kind: Kind
    rank: int
    host: str
    gap_s: float
    lost_s: float
    repeated: int


class Result(msgspec.Struct):
    """One case. ``steps_per_s``: without any kill and as fast as it goes, with what the way does
    against failures; ``steady_cost``: how much slower that is than untouched; ``cpu_s_per_step``:
    what this machine's cores spent meanwhile, ``snapshot_cpu_s``: what one snapshot adds to it.
    ``alarms``: hosts that were only silent; ``alarm_lost_s``: the median of their ``lost_s``.
    ``job_s``: what the job that met all of ``met`` took from its first step to its last;
    ``job_ratio``: to untouched.
    """

    case: Case
    kills: list[Kill] = []
    met: list[Met] = []
    alarms: list[Kill] = []
    steady_steps: int = 0
    steady_snapshots: int = 0
    pauses: list[float] = []
    skipped: str = ""
    failed: dict[str, str] = {}
    identical: bool | None = None
    difference: str = ""
    goals: list[Goal] = []

    way: str = ""
    gb: float = 0.0
    ranks: int = 0
    suspicion_s: float = 0.0
    noticed_s: float | None = None
    first_step_s: float | None = None
    first_step_most_s: float | None = None
    lost_s: float | None = None
    lost_most_s: float | None = None
    repeated_s: float | None = None
    pause_s: float | None = None
    snapshots: int = 0
    image_bytes: int | None = None
    bit_identical: bool | None = None
    steps_per_s: float | None = None
    steady_cost: float | None = None
    cpu_s_per_step: float | None = None
    snapshot_cpu_s: float | None = None
    alarm_lost_s: float | None = None
    job_s: float | None = None
    job_ratio: float | None = None

    def sum_up(self, untouched: Result | None) -> None:
        """Fill in what follows from what was measured."""
        self.way, self.gb, self.suspicion_s = self.case.way, self.case.gb, self.case.suspicion
        self.ranks = self.case.ranks
        self.bit_identical = self.identical
        self.snapshots = len(self.pauses)
        self.pause_s = middle(self.pauses)
        if untouched is not None and untouched.steps_per_s and self.steps_per_s:
            self.steady_cost = 1 - self.steps_per_s / untouched.steps_per_s
        if untouched is not None and untouched.cpu_s_per_step and self.steady_snapshots:
            assert self.cpu_s_per_step is not None
            more = (self.cpu_s_per_step - untouched.cpu_s_per_step) * self.steady_steps
            self.snapshot_cpu_s = more / self.steady_snapshots
        if untouched is not None and untouched.job_s and self.job_s:
            self.job_ratio = self.job_s / untouched.job_s
        self.alarm_lost_s = middle(each.lost_s for each in self.alarms)
        if self.kills:
            self.noticed_s = middle(each.noticed_s for each in self.kills)
            self.first_step_s = median(each.first_step_s for each in self.kills)
            self.first_step_most_s = max(each.first_step_s for each in self.kills)
            self.lost_s = median(each.lost_s for each in self.kills)
            self.lost_most_s = max(each.lost_s for each in self.kills)
            self.repeated_s = median(each.repeated_s for each in self.kills)


class Run(Record, kw_only=True):
    effort: Effort
    torchft: str
    cases: list[Result] = msgspec.field(default_factory=list)

    def of(self, case: Case) -> Result | None:
        return next((found for found in self.cases if found.case == case), None)


SAME = (*ALIKE, "torchft")
