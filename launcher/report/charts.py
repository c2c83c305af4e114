# SPDX-License-Identifier: Apache-2.0
"""Draws the page's two charts: losses over steps, and step times over the seconds of each run.

Each chart is an inline SVG that stretches with its box (``preserveAspectRatio="none"``, strokes do
not scale). The words around it are HTML, so that text keeps its size at every width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from . import quantities as q
from .record import DowntimeReport, RankRun, ReportedMigration, difference, gaps_of

Point = tuple[float, float]
LIMIT = 1600  # points per line: more than a screen can show
SIZE = 1000  # the drawing is SIZE × SIZE units, stretched to its box


@dataclass(frozen=True, slots=True)
class Range:
    """One axis: its end values, and the values at its marks."""

    low: float
    high: float
    marks: tuple[float, ...] = field(default=())

    def part(self, value: float) -> float:
        """Return where a value lies between the ends, 0 to 1; 0.5 if the ends are equal."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def label(self, value: float) -> str:
        """Return a mark's text, with just the decimals that its neighbours need."""
        step = self.marks[1] - self.marks[0] if len(self.marks) > 1 else abs(value) or 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{value:.{digits}f}"


def axis(low: float, high: float, count: int) -> Range:
    """An axis over [low, high] with about ``count`` marks at 1, 2 or 5 times a power of 10."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Range(low, high, tuple(round(n * step, 12) for n in range(first, last + 1)))


def loss_chart(report: DowntimeReport, rank: int) -> str:
    """Draw one rank's loss in both runs, and below it the largest difference over all ranks."""
    reference, moved = run_of(report.reference, rank), run_of(report.moved, rank)
    lines = [
        [(float(s.step), s.loss) for s in run.steps if math.isfinite(s.loss)]
        for run in (reference, moved)
    ]
    points = [p for line in lines for p in line]
    if not points:
        return empty("No step was recorded.")
    x = axis(min(p[0] for p in points), max(p[0] for p in points), 8)
    losses = [p[1] for p in points]
    spread = (max(losses) - min(losses)) or 1.0
    y = axis(min(losses) - spread * 0.05, max(losses) + spread * 0.05, 5)
    drawing, mark, label = grid(y), "", ""
    if report.gap:
        place = x.part(report.gap.step)
        mark = f'<path class="move" d="M{SIZE * place:.1f} 0V{SIZE}"/>'
        label = flag(move_label(report.move), place, place)
    drawing += mark + curve("reference", lines[0], x, y) + curve("moved", lines[1], x, y)
    caption = f"Loss of rank {rank} over steps, reference and moved run laid over each other"
    return plot(drawing, caption, y, "", label, "tall") + difference_strip(report, x, mark)


def difference_strip(report: DowntimeReport, x: Range, mark: str) -> str:
    """Draw the largest |moved - reference| over all ranks at each step: a flat line if equal.
    ``mark`` is the drawing of the move."""
    left = {(r.rank, s.step): s.loss for r in report.reference for s in r.steps}
    right = {(r.rank, s.step): s.loss for r in report.moved for s in r.steps}
    worst: dict[int, float] = {}
    for key in left.keys() | right.keys():
        a, b = left.get(key), right.get(key)
        same = a is not None and b is not None and a.hex() == b.hex()
        worst[key[1]] = max(worst.get(key[1], 0.0), 0.0 if same else difference(a, b))
    finite = [v for v in worst.values() if math.isfinite(v)]
    top = max(finite, default=0.0)
    # A step that one run lacks is drawn above the highest true difference.
    ceiling = 1.25 * top or 1.0
    line = [(float(n), min(v, ceiling)) for n, v in sorted(worst.items())]
    y = Range(-0.5 * ceiling, ceiling, (0.0, top) if top else (0.0,))
    kind = "zero" if not any(worst.values()) else "apart"
    drawing = mark + curve(kind, line, x, y)
    largest = max(worst.values(), default=0.0)
    text = "0" if largest == 0 else "no limit: a step is missing" if largest == math.inf else None
    note = f'<p class="note">max |difference|, all ranks = <b>{text or f"{largest:.3g}"}</b></p>'
    names = "".join(f'<span style="bottom:{100 * y.part(v):.1f}%">{v:.2g}</span>' for v in y.marks)
    return note + plot(
        drawing, "Largest difference of losses over steps", y, "step", "", "strip", x, names
    )


def pace_chart(report: DowntimeReport, rank: int) -> str:
    """Draw each step as a block, as wide and as high as the step lasted, so that the gap stands
    out both ways."""
    reference, moved = run_of(report.reference, rank), run_of(report.moved, rank)
    if len(moved.steps) < 2:
        return empty("Fewer than two steps were recorded.")
    begin = moved.steps[0].time
    blocks = [skyline(run, run.steps[0].time if run.steps else 0.0) for run in (reference, moved)]
    points = [p for line in blocks for p in line]
    x = axis(0, max(p[0] for p in points), 8)
    y = axis(0, 1.12 * max(p[1] for p in points), 4)
    start = min(max(report.move.started_at - begin, 0.0), x.high)
    end = min(start + report.move.total_s, x.high)
    left, width = SIZE * x.part(start), SIZE * (x.part(end) - x.part(start))
    move = f'<rect class="moving" x="{left:.1f}" y="0" width="{width:.1f}" height="{SIZE}"/>'
    drawing, label = grid(y) + move, ""
    if gap := report.gap:
        text = f"{move_label(report.move)}: {q.pause(gap.seconds)} from one step to the next"
        top = 1 - y.part(1000 * gap.seconds)
        label = flag(text, x.part(gap.start - begin), x.part(gap.end - begin), top)
    drawing += curve("reference", blocks[0], x, y) + curve("moved filled", blocks[1], x, y, True)
    caption = f"Milliseconds per step of rank {rank} over the seconds of each run"
    return plot(drawing, caption, y, "seconds since the first step", label, "steps", x)


def move_label(migration: ReportedMigration) -> str:
    return f"{migration.source} → {migration.destination}"


def run_of(runs: Sequence[RankRun], rank: int) -> RankRun:
    return next((run for run in runs if run.rank == rank), RankRun(rank, (), ""))


def skyline(run: RankRun, begin: float) -> list[Point]:
    """Return the outline of blocks, one per step: milliseconds over seconds since ``begin``."""
    gaps = gaps_of(run)
    stride = max(1, math.ceil(4 * len(gaps) / LIMIT))
    line: list[Point] = []
    for i in range(0, len(gaps), stride):
        # A block of several steps shows their longest one: an average would hide the gap.
        some = gaps[i : i + stride]
        height = 1000 * max(g.seconds for g in some)
        line += [(some[0].start - begin, height), (some[-1].end - begin, height)]
    return line


def curve(kind: str, line: Sequence[Point], x: Range, y: Range, floor: bool = False) -> str:
    """Draw a line, thinned to what a screen can show. With ``floor`` its ends go down to
    ``y.low``."""
    points = list(line)
    if len(points) > LIMIT:
        stride = math.ceil(len(points) / LIMIT)
        points = [*points[::stride], points[-1]]
    if not points:
        return ""
    if floor:
        points = [(points[0][0], y.low), *points, (points[-1][0], y.low)]
    places = " ".join(f"{SIZE * x.part(a):.1f},{SIZE * (1 - y.part(b)):.1f}" for a, b in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def grid(y: Range) -> str:
    heights = (SIZE * (1 - y.part(v)) for v in y.marks)
    return "".join(f'<path class="grid" d="M0 {h:.1f}H{SIZE}"/>' for h in heights)


def flag(text: str, left: float, right: float, top: float = 0.0) -> str:
    """Place a label beside [left, right] of a chart, on the side with more room. ``top`` is its
    height: 0 for the upper edge, 1 for the lower one."""
    before = left > 1 - right
    place = f"right:{100 * (1 - left):.2f}%" if before else f"left:{100 * right:.2f}%"
    kind = "flag before" if before else "flag"
    place += f";top:calc({100 * top:.1f}% - 2px)"
    return f'<span class="{kind}" style="{place}">{escape(text)}</span>'


def plot(
    drawing: str,
    caption: str,
    y: Range,
    under: str,
    labels: str = "",
    kind: str = "",
    x: Range | None = None,
    heights: str = "",
) -> str:
    """Put its axes' words around a drawing. Without ``x`` the chart below it has the marks."""
    names = heights or "".join(
        f'<span style="bottom:{100 * y.part(v):.2f}%">{y.label(v)}</span>' for v in y.marks
    )
    feet = (
        "".join(f'<span style="left:{100 * x.part(v):.2f}%">{x.label(v)}</span>' for v in x.marks)
        if x
        else ""
    )
    return (
        f'<div class="plot {kind}"><div class="y">{names}</div><div class="area">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(caption)}">{drawing}</svg>{labels}</div>'
        + (f'<div class="x">{feet}</div><p class="under">{under}</p>' if x else "")
        + "</div>"
    )


def empty(caption: str) -> str:
    return f'<p class="note">{escape(caption)}</p>'
