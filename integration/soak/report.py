# SPDX-License-Identifier: Apache-2.0
"""The outcome of a soak: build/soak.json, and tables for a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Group
from rich.table import Table

from .growth import DaemonUsage, Usage
from .losses import Loss
from .watch import Sample


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        rising = sorted(seconds)
        last = len(rising) - 1
        return cls(rising[last // 2], rising[round(0.95 * last)], rising[-1])


class Report(msgspec.Struct, frozen=True):
    """``pause``: how long the job was frozen for a move, ``whole``: how long the move took.
    ``before`` and ``after`` the moves: what there was of each kind on all hosts. ``back``: seconds
    from the loss of a host until the job ran again."""

    seconds: float
    steps: int
    moves: int
    failed: int
    refused: int
    moves_per_minute: float
    pause: Spread
    whole: Spread
    image_bytes: int
    identical: bool
    daemons: dict[str, DaemonUsage]
    before: dict[str, int]
    after: dict[str, int]
    samples: list[Sample]
    pauses: list[float]
    problems: list[str]
    losses: list[Loss] = []
    back: Spread | None = None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self) + b"\n")


WIDTH = 110
"""Columns that the tables need."""


def tables(report: Report) -> Group:
    return Group(_moves(report), _daemons(report), _things(report))


def _moves(report: Report) -> Table:
    table = _table("Moves", "", "")
    pause, whole = report.pause, report.whole
    rows = {
        "moves": f"{report.moves} in {report.seconds / 60:.1f} min, {report.failed} failed",
        "moves a minute": f"{report.moves_per_minute:.1f}",
        "the job was frozen": f"{pause.median:.2f} s median, {pause.p95:.2f} s 95th percentile,"
        f" {pause.worst:.2f} s worst",
        "a move took": f"{whole.median:.2f} s median, {whole.worst:.2f} s worst",
        "image": f"{report.image_bytes / 1e6:.0f} MB at most",
        "steps": f"{report.steps}, all losses and parameters "
        + ("identical to a run without moves" if report.identical else "NOT identical"),
    }
    if report.losses and report.back:
        count, ran = len(report.losses), sum(loss.ran for loss in report.losses)
        rows["hosts lost"] = f"{count}, of which {ran} ran a rank"
        rows["the job ran again after"] = (
            f"{report.back.median:.2f} s median, {report.back.worst:.2f} s worst"
        )
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _daemons(report: Report) -> Table:
    columns = (
        "own memory, MB",
        "an hour",
        "descriptors",
        "an hour",
        "threads",
        "an hour",
        "CPU s/min",
    )
    table = _table("Daemons: first → last, and growth", "host", *columns)
    for name, seen in report.daemons.items():
        table.add_row(
            name,
            *_usage(seen.memory, 1e6),
            *_usage(seen.descriptors, 1),
            *_usage(seen.threads, 1),
            f"{seen.cpu_per_minute:.1f}",
        )
    return table


def _things(report: Report) -> Table:
    table = _table("On all hosts together, at rest", "", "before", "after")
    for kind, count in report.before.items():
        table.add_row(kind, f"{count:,}", f"{report.after[kind]:,}")
    return table


def _usage(usage: Usage, unit: float) -> tuple[str, str]:
    digits = 1 if unit > 1 else 0
    first, last = usage.first / unit, usage.last / unit
    growth = "–" if usage.per_hour is None else f"{usage.per_hour / unit:+.1f}"
    return f"{first:.{digits}f} → {last:.{digits}f}", growth


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(
            name, justify="right" if len(columns) > 1 else "left", no_wrap=len(columns) > 1
        )
    return table
