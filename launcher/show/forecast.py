# SPDX-License-Identifier: Apache-2.0
"""Pauses of a job for people: as predicted, while a move is under way, and beside what was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...runtime.config.choices import Way
from ...runtime.cost import prediction
from ...runtime.model.steps import MigrationStep
from ..report import quantities as q
from ..report.expected import Expected, ExpectedPart
from . import render

if TYPE_CHECKING:
    from rich.table import Table

    from ...runtime.messages import MigrationRow, Prediction

COPYING = frozenset(
    {MigrationStep.PREPARING.value, MigrationStep.PRECOPYING.value, MigrationStep.QUIESCING.value}
)
STANDING = frozenset(
    {
        MigrationStep.FREEZING.value,
        MigrationStep.COMMITTED.value,
        MigrationStep.RESTORING.value,
        MigrationStep.RETURNING.value,
    }
)


def planned(found: Prediction) -> Expected:
    """Return the prediction of a move that has not begun."""
    parts = tuple(ExpectedPart(p.name, p.seconds, None, p.bytes, p.detail) for p in found.parts)
    return Expected(found.way, found.why, found.seconds, None, parts, found.learnt, found.left_out)


def compared(row: MigrationRow) -> Expected | None:
    """Return a prediction with what was seen. None: there is no prediction, or the job was not
    stopped."""
    found = row.predicted
    if found is None or not row.frozen_s:
        return None
    took = prediction.seen(row)
    expected = planned(found)
    parts = [replace(part, seen_s=took.pop(part.name, 0.0)) for part in expected.parts]
    parts += [ExpectedPart(name, None, seconds) for name, seconds in took.items() if seconds]
    return replace(expected, seen_s=prediction.stood(row), parts=tuple(parts))


def table(expected: Expected) -> Table:
    """Return a table of the parts and their sum, with a column of what was seen if it is known."""
    seen = expected.seen_s is not None
    columns = ["part", "predicted", *(["seen"] if seen else []), "bytes", "what"]
    made = render.table(*columns, right=("predicted", "seen", "bytes"))

    def add(name: str, predicted: str, took: float | None, size: int | None, what: str) -> None:
        cells = [name, predicted, *([q.seconds(took or 0.0)] if seen else [])]
        made.add_row(*cells, "" if size is None else q.size(size), what)

    for part in expected.parts:
        known = "?" if part.predicted_s is None else q.seconds(part.predicted_s)
        add(part.name, known, part.seen_s, part.bytes, part.detail)
    add("total", q.seconds(expected.predicted_s), expected.seen_s, None, expected.grounds)
    return made


def in_short(expected: Expected) -> str:
    """Return ``predicted pause 0.62 s (pre-copy)``, with what was seen once it is over."""
    without = f", without {expected.left_out}" if expected.left_out else ""
    seen = "" if expected.seen_s is None else f", seen {q.pause(expected.seen_s)}"
    about = q.pause(expected.predicted_s)
    return f"predicted pause {about}{without}{seen} ({expected.by})"


def cost_lines(found: Prediction) -> list[str]:
    """Return ``would cost about 0.9 s of training (paused 0.6, slower 0.3); host empty after 2.4 s;
    way: …``, then what else was weighed."""
    text = (
        f"would cost about {q.pause(found.lost_s)} of training (paused {found.seconds:.2f}, slower"
        f" {found.slower_s:.2f}); host empty after {q.pause(found.empty_s)}"
    )
    if not found.lost_s:  # an older version has made this record
        return []
    if not found.how:
        return [text]
    made = [f"{text}; way: {found.how}, as {found.because}"]
    if found.needs_s is not None:
        made.append(f"may not be gone in time: it needs up to {q.pause(found.needs_s)}")
    for each in found.weighed:
        speed = "" if each.way == Way.STOP else f" at {q.rate(each.speed)}"
        made.append(
            f"  {each.way}{speed}: {q.pause(each.lost_s)} lost, {q.pause(each.pause_s)} of it"
            f" paused; host empty after {q.pause(each.empty_s)}"
        )
    return made


def lines(rows: Iterable[MigrationRow]) -> list[str]:
    """Return lines for below the bars or the table: one for each move that has something to say."""
    texts = [(row.capsule, text) for row in rows if (text := now(row))]
    return [f"  {f'{capsule}: ' if len(texts) > 1 else ''}{text}" for capsule, text in texts]


def now(row: MigrationRow) -> str:
    """Return how a move under way stands with respect to its pause, in a line; often empty."""
    total = row.precopy.stop_s if row.precopy and row.precopy.stop_s is not None else None
    about = "about "
    if total is None and row.predicted is not None:
        total = row.predicted.seconds
        about = "at most " if prediction.at_most(row.predicted) else about
    about = "" if total is None else about + q.pause(total)
    if row.state in STANDING and row.frozen_s:
        of = f" of {about}" if about else ""
        return f"paused for {q.pause(row.frozen_s)}{of}"
    if row.state not in COPYING:
        return ""
    will = f"pause {about}" if about else ""
    if (seen := row.precopy) is None or not seen.round:
        return will
    dirty = f": {q.size(seen.dirty)} dirty" if seen.dirty else ""  # 0: not looked at yet
    parts = [f"round {seen.round}{dirty}", q.rate(seen.rate)]
    if seen.slow_down is not None:
        parts.append(f"job {q.share(seen.slow_down, 1.0)} slower")
    return ", ".join([*parts, *filter(None, [will])])
