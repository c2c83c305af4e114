# SPDX-License-Identifier: Apache-2.0
"""A migration's phases as bars, one row each, in HTML: it reads the same at every width."""

from __future__ import annotations

from html import escape

from . import quantities as q
from .charts import Range, axis
from .record import Migration, Report


def timeline(report: Report, migration: Migration) -> str:
    """The phases as bars over the seconds since the migration's start, and the gap in the steps."""
    gap = report.gap_of(migration)
    origin = migration.started_at
    end = max([migration.total_s, *(p.start + p.seconds for p in migration.phases)])
    if gap:
        end = max(end, gap.end - origin)
    x = axis(min([0.0, *(p.start for p in migration.phases)]), end * 1.01 or 1.0, 6)
    step = x.marks[1] - x.marks[0] if len(x.marks) > 1 else x.high - x.low
    rows = [
        bar(p.name, "still" if p.frozen else "runs", p.start, p.seconds, x)
        for p in migration.phases
    ]
    if gap:
        left = max(gap.start - origin, x.low)
        right = max(left, gap.end - origin)
        rows.append(bar("no step", "gap", left, right - left, x, gap.seconds))
    names = "".join(
        f'<span style="left:{100 * x.part(v):.2f}%">{x.label(v)}</span>' for v in x.marks
    )
    tick = 100 * step / (x.high - x.low)
    return (
        f'<div class="timeline" style="--tick:{tick:.3f}%">{"".join(rows)}'
        f'<div class="row axis"><span></span><div class="x">{names}</div><span></span></div>'
        '<p class="under">seconds since the move began</p></div>'
    )


def bar(name: str, kind: str, start: float, length: float, x: Range, said: float = -1) -> str:
    """One row of the timeline; ``said`` is the number to print when the bar was cut."""
    text = q.seconds(length if said < 0 else said)
    place = f"left:{100 * x.part(start):.2f}%;width:{100 * length / (x.high - x.low):.2f}%"
    return (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f'<div class="track"><i class="bar {kind}" style="{place}"></i></div>'
        f'<span class="num">{text}</span></div>'
    )
