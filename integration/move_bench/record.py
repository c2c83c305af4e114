# SPDX-License-Identifier: Apache-2.0
"""build/bench-move.json: what was measured after every case; a run can be resumed.

Seconds and bytes. Medians over the moves of a case, except where a list is given.
"""

from __future__ import annotations

from statistics import median

import msgspec
from bench_record import Goal, Record, middle

from .cases import Case, Effort

FILE = "bench-move.json"


class PhaseRow(msgspec.Struct, frozen=True):
    """A phase in the median of moves. ``own_s``: its part of the downtime, which no phase that
    began later in it has; 0 where the job trained on."""

    name: str
    seconds: float
    own_s: float
    frozen: bool
    bytes: int | None = None


class Moved(msgspec.Struct, frozen=True):
    """One move by liveshift, from the job's step log and the migration's record.

    ``way``: what became of the pre-copy of memory, in the product's words. ``predicted_s``: what
    was expected of the pause when the job was about to be stopped. ``lost_s``: of training, by
    the step log, which can be off by ``unsure_s`` on this machine; ``measured_s``: the same as
    liveshift says, None where it does not and ``why_not`` says why; ``predicted_lost_s``: what was
    expected of it when the way was chosen.
    ``cpu_source_s`` and ``cpu_destination_s``: of the agents and CRIU, per GB of memory;
    ``sent_share``: bytes sent per byte of memory.
    """

    way: str
    downtime_s: float
    predicted_s: float | None
    step_s: float
    seconds: float
    frozen_s: float
    bytes_before: int
    bytes_standing: int
    image_bytes: int
    delta_bytes: int
    slow_down: float | None
    time_to_full_speed_s: float | None
    unaccounted_s: float
    phases: list[PhaseRow]
    lost_s: float
    empty_s: float
    measured_s: float | None = None
    why_not: str = ""
    memory_bytes: int = 0
    cpu_source_s: float | None = None
    cpu_destination_s: float | None = None
    sent_share: float | None = None
    predicted_lost_s: float | None = None
    unsure_s: float = 0.0


class ByHand(msgspec.Struct, frozen=True):
    """One move by hand: dump, copy, restore."""

    downtime_s: float
    dump_s: float
    copy_s: float
    restore_s: float
    image_bytes: int
    lost_s: float


class Restart(msgspec.Struct, frozen=True):
    """One kill and new start from a checkpoint. ``seconds``: from the kill until it had made the
    ``lost_steps`` again; ``first_step_s``: until it had made the first of them."""

    seconds: float
    lost_steps: int
    first_step_s: float
    checkpoint_bytes: int


class Fixed(msgspec.Struct, frozen=True):
    """CRIU's dump and restore of a process that does nothing, medians."""

    sleep_s: float
    torch_s: float
    torch_bytes: int


class Limits(msgspec.Struct, frozen=True):
    """What a move of a case cannot be faster than. ``rate``: bytes per second of the bare copy;
    ``fixed``: measured just before the moves, so that what else the machine did bears on both.
    ``strict_s`` is with the fixed cost of ``sleep``, ``seconds`` with that of an idle torch; both
    for the bytes that the pause had to carry, ``whole_s`` for all memory. ``cpu_s``: CPU seconds
    per GB of a bare loop of copy, hash and seal on both sides."""

    rate: float
    fixed: Fixed
    seconds: float = 0.0
    strict_s: float = 0.0
    whole_s: float = 0.0
    cpu_s: float | None = None


class Drain(msgspec.Struct, frozen=True):
    """One drain with a deadline. ``planned_s``, ``empty_s``: until the host is empty, as the plan
    said and as it was. ``late``: how many capsules the plan said may not be gone in time."""

    capsules: int
    within_s: float
    planned_s: float
    late: int
    empty_s: float
    in_time: bool
    together: bool


class Result(msgspec.Struct):
    """One case; what there is no memory for is in ``skipped``, what went wrong in
    ``failed``, each with the reason."""

    case: Case
    resident_bytes: int = 0
    steps: int = 0
    moves: list[Moved] = []
    by_hand: list[ByHand] = []
    restarts: list[Restart] = []
    limit: Limits | None = None
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    identical: bool | None = None
    difference: str = ""
    goals: list[Goal] = []

    job: str = ""
    gb: float = 0.0
    link: str = ""
    way: str = ""
    lost_s: float | None = None
    measured_s: float | None = None
    not_measured: list[str] = []
    """Why liveshift did not measure moves of this case, each reason once."""
    pause_s: float | None = None
    empty_s: float | None = None
    memory_bytes: int | None = None
    cpu_s_per_gb: float | None = None
    cpu_source_s_per_gb: float | None = None
    cpu_destination_s_per_gb: float | None = None
    cpu_limit_s_per_gb: float | None = None
    sent_share: float | None = None
    by_hand_lost_s: float | None = None
    restart_lost_s: float | None = None
    limit_s: float | None = None
    downtime_s: float | None = None
    ratio_to_limit: float | None = None
    ratio_to_limit_strict: float | None = None
    ratio_by_hand: float | None = None
    ratio_checkpoint_restart: float | None = None
    predicted_s: float | None = None
    predicted_lost_s: float | None = None
    slow_down: float | None = None
    time_to_full_speed_s: float | None = None
    bytes: int | None = None
    bytes_before: int | None = None
    bytes_standing: int | None = None
    delta_bytes: int | None = None
    bit_identical: bool | None = None
    phases: list[PhaseRow] = []
    unaccounted_s: float | None = None
    unaccounted_share: float | None = None

    def sum_up(self) -> None:
        """Fill in what follows from what was measured."""
        self.job, self.gb, self.link, self.way = msgspec.structs.astuple(self.case)
        if self.by_hand:
            self.by_hand_lost_s = median(h.lost_s for h in self.by_hand)
        if self.restarts:  # from the kill until it is as far again: all of that is lost
            self.restart_lost_s = median(r.seconds for r in self.restarts)
        if not self.moves:
            return
        self._sum_up_costs()
        self.bit_identical = self.identical
        self.downtime_s = median(m.downtime_s for m in self.moves)
        self.predicted_s = middle(m.predicted_s for m in self.moves)
        self.predicted_lost_s = middle(m.predicted_lost_s for m in self.moves)
        self.slow_down = middle(m.slow_down for m in self.moves)
        self.time_to_full_speed_s = middle(m.time_to_full_speed_s for m in self.moves)
        self.bytes_before = int(median(m.bytes_before for m in self.moves))
        self.bytes_standing = int(median(m.bytes_standing for m in self.moves))
        self.bytes = self.bytes_before + self.bytes_standing
        self.delta_bytes = int(median(m.delta_bytes for m in self.moves))
        self.phases = phase_rows(self.moves)
        self.unaccounted_s = median(m.unaccounted_s for m in self.moves)
        self.unaccounted_share = median(
            m.unaccounted_s / m.downtime_s if m.downtime_s else 0.0 for m in self.moves
        )
        if self.limit:
            rate, fixed = self.limit.rate, self.limit.fixed
            copy = self.delta_bytes / rate
            whole = (self.memory_bytes or self.resident_bytes) / rate + fixed.torch_s
            self.limit = Limits(
                rate, fixed, copy + fixed.torch_s, copy + fixed.sleep_s, whole, self.limit.cpu_s
            )
            self.limit_s, self.cpu_limit_s_per_gb = whole, self.limit.cpu_s
            self.ratio_to_limit = self.downtime_s / self.limit.seconds
            self.ratio_to_limit_strict = self.downtime_s / self.limit.strict_s
        if self.by_hand:
            self.ratio_by_hand = median(h.downtime_s for h in self.by_hand) / self.downtime_s
        if self.restarts:
            redone = median(r.seconds for r in self.restarts)
            self.ratio_checkpoint_restart = redone / self.downtime_s

    def _sum_up_costs(self) -> None:
        self.lost_s = median(m.lost_s for m in self.moves)
        self.measured_s = middle(m.measured_s for m in self.moves)
        self.not_measured = list(dict.fromkeys(m.why_not for m in self.moves if m.why_not))
        self.pause_s = median(m.downtime_s for m in self.moves)
        self.empty_s = median(m.empty_s for m in self.moves)
        self.memory_bytes = int(median(m.memory_bytes for m in self.moves)) or None
        self.cpu_source_s_per_gb = middle(m.cpu_source_s for m in self.moves)
        self.cpu_destination_s_per_gb = middle(m.cpu_destination_s for m in self.moves)
        if self.cpu_source_s_per_gb is not None and self.cpu_destination_s_per_gb is not None:
            self.cpu_s_per_gb = self.cpu_source_s_per_gb + self.cpu_destination_s_per_gb
        self.sent_share = middle(m.sent_share for m in self.moves)


class Run(Record, kw_only=True):
    effort: Effort
    cases: list[Result] = msgspec.field(default_factory=list)
    drains: list[Drain] = msgspec.field(default_factory=list)
    drained_difference: str = ""
    """How drained jobs differ from an untouched run; empty if none does."""

    def of(self, case: Case) -> Result | None:
        return next((found for found in self.cases if found.case == case), None)


def phase_rows(moves: list[Moved]) -> list[PhaseRow]:
    """Each phase in the median of all moves that had it, in the order of the last move."""
    rows = []
    for name in dict.fromkeys(row.name for move in reversed(moves) for row in move.phases):
        seen = [[row for row in move.phases if row.name == name] for move in moves]
        have = [rows for rows in seen if rows]
        amounts = [sum(r.bytes or 0 for r in each) for each in have]
        told = any(r.bytes is not None for each in have for r in each)
        rows.append(
            PhaseRow(
                name,
                median(sum(r.seconds for r in each) for each in have),
                median(sum(r.own_s for r in each) for each in seen),
                any(r.frozen for each in have for r in each),
                int(median(amounts)) if told else None,
            )
        )
    return rows
