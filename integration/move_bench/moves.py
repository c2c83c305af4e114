# SPDX-License-Identifier: Apache-2.0
"""liveshift's own moves of a job, seen from its step log."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from lab_session import LabSession
from moves_ended import ended

from liveshift.launcher.client.client import Client
from liveshift.launcher.report import gaps
from liveshift.runtime.messages import (
    GetMigration,
    Migrate,
    MigrationDetails,
    MigrationRow,
    Named,
    Phase,
)

from .cases import SETTLED_S, Case, Effort, around
from .machine import PATIENCE_S, training
from .record import Moved, PhaseRow
from .steps import AFTER_S, Gap, StepTail, gap, lost, noise, slow_down

QUIET_S = 0.5
"""So long a job is left alone before a move and after it, and for :func:`around` steps."""
LOOK_S = 0.1
PRECOPY, DELTA = "pre-copy", "memory"
"""Phases: memory while the job trains; what of it was written since, and so sent again."""
COST_S = 15.0
"""How long the product's own measure is waited for: some seconds, more where steps are long."""

AROUND = "interrupted step"
"""The row of the step in which the job stood: slower before by the last round, after by page faults
and caches that are cold; it can be below a usual one by chance."""

Tell = Callable[[str], None]


def measure(
    session: LabSession, case: Case, effort: Effort, kept: Path, tell: Tell
) -> tuple[list[Moved], int, int]:
    """Move the case's job so often; its step log goes to ``kept``.

    Returns the moves, the bytes that the job has resident, and the steps that it made. Raises
    AssertionError when a move fails.
    """
    job = session.start(case.name.replace(".", "-"), training(case, effort))
    log = StepTail(job.out / "rank0.jsonl")

    def alive() -> None:
        assert job.code() is None, f"{job.name} ended:\n{job.output()}"

    steps = around(case)
    log.wait(steps, PATIENCE_S, alive)
    log.wait_after(log.times[0] + SETTLED_S, 1, PATIENCE_S, alive)
    resident = 0
    moves = []
    with Client(session.lab.socket) as client:
        for number in range(effort.moves):
            tell(f"move {number + 1} of {effort.moves}")
            begin = time.time()
            log.wait_after(begin + QUIET_S, steps, PATIENCE_S, alive)
            seen = job.seen(0)
            resident = max(
                resident, sum(psutil.Process(pid).memory_info().rss for pid in seen.tasks.values())
            )
            name = client.get(Named, Migrate(f"{job.name}/0", "", "bench", False)).name
            row = ended(client, name, PATIENCE_S * 3, LOOK_S)
            job.assert_moved(seen, row)
            quiet = row.asked + row.seconds + AFTER_S + QUIET_S
            log.wait_after(quiet, steps, PATIENCE_S, alive)
            row = _costed(client, row)
            for more in range(1, 5):  # until it is seen to be as fast as before, if it becomes so
                log.wait_after(quiet, more * steps, PATIENCE_S, alive)
                now = moved(row, log.times, begin)
                if now.time_to_full_speed_s is not None:
                    break
            moves.append(now)
    job.stop()
    log.wait_end(PATIENCE_S)
    log.keep(kept)
    shutil.rmtree(job.out)
    return moves, resident, log.numbers[-1]


def moved(row: MigrationRow, times: list[float], begin: float) -> Moved:
    """One move; ``begin``: since when the job was left alone before. Raises AssertionError where
    the steps do not bear out that it was moved while it trained."""
    doubts = gaps.doubts(times, row.phases, row.asked)
    assert not doubts, f"{row.name}: {'; '.join(doubts)}"
    seen = gap(times, row.asked + (gaps.held_at(row.phases) or 0.0), row.asked, begin)
    rows, unaccounted = shares(row, seen)
    standing = sent(row, frozen=True)
    window = precopying(row, seen)
    over = row.asked + row.seconds
    way = "; ".join(p.detail for p in row.phases if p.name == PRECOPY and p.detail)
    return Moved(
        way=way or "full dump",
        downtime_s=seen.downtime_s,
        predicted_s=row.predicted.seconds if row.predicted else None,
        step_s=seen.step_s,
        seconds=row.seconds,
        frozen_s=row.frozen_s,
        bytes_before=sent(row, frozen=False),
        bytes_standing=standing,
        image_bytes=row.image_bytes,
        delta_bytes=changed(row, standing),
        slow_down=slow_down(times, window, seen.step_s) if window else None,
        time_to_full_speed_s=seen.full_speed_s,
        unaccounted_s=unaccounted,
        phases=rows,
        lost_s=lost(times, row.asked, over, begin),
        unsure_s=noise(times, row.asked, over, begin),
        empty_s=row.seconds,
        predicted_lost_s=predicted_lost(row),
        **costs(row),
    )


def costs(row: MigrationRow) -> dict[str, Any]:
    """What liveshift says of a move's cost."""
    if (cost := row.cost) is None:
        return {"why_not": f"liveshift did not say within {COST_S:g} s"}
    size = cost.memory_bytes
    source, destination = cost.cpu_source_s, cost.cpu_destination_s
    return {
        "measured_s": cost.lost_s,
        "why_not": cost.why_not,
        "memory_bytes": size,
        "cpu_source_s": source * 1e9 / size if size and source is not None else None,
        "cpu_destination_s": destination * 1e9 / size if size and destination is not None else None,
        "sent_share": cost.sent_bytes / size if size else None,
    }


def predicted_lost(row: MigrationRow) -> float | None:
    """What the move was expected to cost when its way was chosen, before any memory went."""
    if row.predicted is None:
        return None
    weighed = {each.way: each.lost_s for each in row.predicted.weighed}
    return weighed.get(row.predicted.how, row.predicted.lost_s)


def sent(row: MigrationRow, frozen: bool) -> int:
    """Bytes that the source sent; what arrives is counted again after the commit."""
    end = next(p.start for p in row.phases if p.name == "commit")
    return sum(p.bytes or 0 for p in row.phases if p.frozen == frozen and p.start < end)


def precopying(row: MigrationRow, seen: Gap) -> tuple[float, float] | None:
    """When memory went ahead while the job trained, in seconds since the epoch: rounds go on until
    its ranks are brought to a boundary. The step in which it stood says nothing of its speed."""
    found = [p for p in row.phases if p.name == PRECOPY]
    if not found or found[0].bytes is None:
        return None
    end = row.asked + min(p.start for p in row.phases if p.frozen or p.name == "quiesce")
    return row.asked + found[0].start, min(end, seen.start) if seen.end > end else end


def changed(row: MigrationRow, standing: int) -> int:
    """Bytes that the source found written when it froze the capsule. If it did not look for them,
    all bytes that it sent then."""
    found = [p.bytes for p in row.phases if p.name == DELTA and p.bytes is not None]
    return sum(found) if found else standing


def shares(row: MigrationRow, seen: Gap) -> tuple[list[PhaseRow], float]:
    """The phases, and what of the downtime none of them explains.

    Phases lie in each other and beside each other: a moment belongs to the one that began last.
    What the step in which it stood took more than a usual one, before and after, is a row too.
    """
    still = [p for p in row.phases if p.frozen]
    stood = min(_ends(row, p)[0] for p in still)
    went_on = max(_ends(row, p)[1] for p in still)
    edges = sorted(
        {seen.start, seen.end}
        | {edge for p in still for edge in _ends(row, p) if seen.start < edge < seen.end}
    )
    own: dict[int, float] = {}
    covered = 0.0
    for since, until in pairwise(edges):
        there = [p for p in still if _ends(row, p)[0] <= since and _ends(row, p)[1] >= until]
        if there:
            last = max(there, key=lambda p: p.start)
            own[id(last)] = own.get(id(last), 0.0) + until - since
            covered += until - since
    rows = [PhaseRow(p.name, p.seconds, own.get(id(p), 0.0), p.frozen, p.bytes) for p in row.phases]
    around = max(0.0, stood - seen.start) + max(0.0, seen.end - went_on) - seen.step_s
    rows.append(PhaseRow(AROUND, around + seen.step_s, around, False))
    return rows, seen.downtime_s - covered - around


def _ends(row: MigrationRow, phase: Phase) -> tuple[float, float]:
    begin = row.asked + phase.start
    return begin, begin + phase.seconds


def _costed(client: Client, row: MigrationRow) -> MigrationRow:
    """The same move once its cost is known, or will not be."""
    until = time.monotonic() + COST_S
    while row.cost is None and time.monotonic() < until:
        time.sleep(LOOK_S)
        row = client.get(MigrationDetails, GetMigration(row.name)).row
    return row
