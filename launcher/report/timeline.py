# SPDX-License-Identifier: Apache-2.0
"""Draws a migration's phases as bars in HTML, on two axes: the whole move, and its freeze enlarged.

The first axis has the phases in which the job trains, the second one the others. The second axis is
the bar "frozen" of the first one, made as wide as the page. It looks the same at every width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from . import gaps
from . import quantities as q
from .charts import Range, axis
from .record import DowntimeReport, Gap, ReportedMigration, covered

SLIVER = 0.01
"""Phases of the freeze that take less than this share of it share one row."""
Bar = tuple[float, float]


def timeline(report: DowntimeReport) -> str:
    """Draw both axes, and the wedge that leads from the first to the second."""
    migration, gap = report.move, report.gap
    runs = [p for p in migration.phases if not p.frozen]
    end = max((p.start + p.seconds for p in migration.phases), default=0.0)
    low = min([0.0, *(p.start for p in migration.phases)])
    whole = axis(low, max(end, migration.total_s) * 1.01 or 1.0, 6)
    rows = [(p.start, _row(p.name, "runs", [(p.start, p.seconds)], p.seconds, whole)) for p in runs]
    freeze = gaps.freeze(migration.phases)
    if freeze:
        still = [(freeze[0], freeze[1] - freeze[0])]
        rows.append((freeze[0], _row("frozen", "still", still, migration.frozen_s, whole)))
    rows.sort(key=lambda row: row[0])
    first = _chart([row for _, row in rows], whole, "seconds since the move began")
    if not freeze:
        return first
    zoomed = _zoomed_axis(migration, freeze, gap)
    left, right = (100 * whole.part(freeze[0] + edge) for edge in (zoomed.low, zoomed.high))
    return first + _wedge(left, right) + _zoomed(migration, gap, zoomed, freeze[0])


def _zoomed_axis(
    migration: ReportedMigration, freeze: tuple[float, float], gap: Gap | None
) -> Range:
    """Return the freeze's axis. It goes from the step before the freeze to the step after it, in
    seconds since the freeze began."""
    low, high = 0.0, freeze[1] - freeze[0]
    if gap:
        origin = migration.started_at + freeze[0]
        low, high = min(low, gap.start - origin), max(high, gap.end - origin)
    return axis(low, high * 1.005 or 1.0, 8)


def _zoomed(migration: ReportedMigration, gap: Gap | None, x: Range, offset: float) -> str:
    """Draw the freeze, which began ``offset`` seconds after the move."""
    frozen = [p for p in migration.phases if p.frozen]
    rows = []
    if gap:
        start = gap.start - migration.started_at - offset
        rows.append(_row("no step", "gap", [(start, gap.seconds)], gap.seconds, x))
    least = SLIVER * migration.frozen_s
    for phase in (p for p in frozen if p.seconds >= least):
        bars = [(phase.start - offset, phase.seconds)]
        rows.append(_row(phase.name, "still", bars, phase.seconds, x))
    if short := [p for p in frozen if p.seconds < least]:
        bars = [(p.start - offset, p.seconds) for p in short]
        names = ", ".join(dict.fromkeys(p.name for p in short))
        rows.append(_row(f"{len(short)} short ones", "still", bars, covered(short), x, names))
    return _chart(rows, x, "seconds since the freeze began", "zoomed")


def _chart(rows: Iterable[str], x: Range, under: str, kind: str = "") -> str:
    names = "".join(
        f'<span style="left:{100 * x.part(v):.2f}%">{x.label(v)}</span>' for v in x.marks
    )
    step = x.marks[1] - x.marks[0] if len(x.marks) > 1 else x.high - x.low
    tick, first = 100 * step / (x.high - x.low), 100 * x.part(x.marks[0]) if x.marks else 0.0
    return (
        f'<div class="timeline {kind}" style="--tick:{tick:.3f}%;--first:{first:.3f}%">'
        f'{"".join(rows)}<div class="row axis"><span></span><div class="x">{names}</div>'
        f'<span></span></div><p class="under">{under}</p></div>'
    )


def _wedge(left: float, right: float) -> str:
    """Draw the wedge from the freeze on the first axis to the whole second axis."""
    points = f"{left:.2f},0 {right:.2f},0 100,100 0,100"
    return (
        '<div class="row wedge"><span></span><svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'aria-hidden="true"><polygon points="{points}"/></svg><span></span></div>'
    )


def _row(
    name: str, kind: str, bars: Sequence[Bar], seconds: float, x: Range, names: str = ""
) -> str:
    """Draw one row. ``names``: the phases that it is made of, shown under the mouse pointer."""
    drawn = "".join(_bar(kind, start, length, x) for start, length in bars)
    hint = f' title="{escape(names, quote=True)}"' if names else ""
    return (
        f'<div class="row"{hint}><span class="name">{escape(name)}</span>'
        f'<div class="track">{drawn}</div><span class="num">{q.seconds(seconds)}</span></div>'
    )


def _bar(kind: str, start: float, length: float, x: Range) -> str:
    left, right = max(start, x.low), min(start + length, x.high)
    width = max(0.0, right - left) / (x.high - x.low)
    place = f"left:{100 * x.part(left):.2f}%;width:{100 * width:.2f}%"
    return f'<i class="bar {kind}" style="{place}"></i>'
