# SPDX-License-Identifier: Apache-2.0
"""What came of the matrix: a line per cell, a table at the end, and a file for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from liveshift.runtime.daemon.faultpoints import POINTS

from .cell import Verdict
from .table import ENDED, MOVED, STAYED, Cell

FILE = "fault-matrix.json"

_SIGNS = {MOVED: "→", STAYED: "=", ENDED: "†"}
_STYLES = {MOVED: "green", STAYED: "cyan", ENDED: "yellow"}


class Report:
    """Collects verdicts in ``directory``; the file there is true after every cell."""

    WIDTH = 132
    """Of the whole table, in characters."""

    def __init__(self, directory: Path, console: Console) -> None:
        self.verdicts: list[Verdict] = []
        self._directory = directory
        self._console = console
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def begin(self, cell: Cell, number: int, count: int) -> None:
        if self._console.is_terminal:
            self._console.print(f"[dim]{number:3}/{count}  {cell.name} …[/]", end="\r")

    def take(self, verdict: Verdict, number: int, count: int) -> None:
        """One cell is over; a failed one leaves what helps to understand it in a file."""
        self.verdicts.append(verdict)
        self._write()
        word = Text(verdict.outcome, style=_STYLES.get(verdict.outcome, "red"))
        line = Text(f"{number:3}/{count}  {verdict.point:24} {verdict.fault:30} ").append(word)
        if not verdict.passed:
            line.append("  FAILED", style="bold red")
        line.append(f"  {verdict.seconds:.1f} s, longest gap {verdict.gap_s:.1f} s", style="dim")
        self._console.print(line, soft_wrap=True)
        if not verdict.passed:
            self._console.print(Text(f"         {verdict.error}", style="red"), soft_wrap=True)
            path = self._directory / f"fault-matrix-{verdict.point}-{verdict.fault}.txt"
            path.write_text(f"{verdict.error}\n\n{verdict.trace}\n")
            self._console.print(f"         see {path}", soft_wrap=True)

    def skip(self, cell: Cell, why: str) -> None:
        self._console.print(f"         {cell.name} cannot be tried here: {why}", soft_wrap=True)

    def table(self) -> Table:
        """Faults down, points across: how each cell ended, its longest gap; ✗ where it failed."""
        points = [point for point in POINTS if any(v.point == point for v in self.verdicts)]
        table = Table(box=box.SIMPLE, pad_edge=False, header_style="bold")
        table.add_column("fault", no_wrap=True)
        for number, _ in enumerate(points, 1):
            table.add_column(str(number), no_wrap=True, justify="right")
        for fault in dict.fromkeys(v.fault for v in self.verdicts):
            found = {v.point: v for v in self.verdicts if v.fault == fault}
            table.add_row(fault, *(_shown(found.get(point)) for point in points))
        return table

    def legend(self) -> str:
        points = [point for point in POINTS if any(v.point == point for v in self.verdicts)]
        words = [f"{number} {point}" for number, point in enumerate(points, 1)]
        return (
            ", ".join(words)
            + "\n→ moved, = stayed, † ended; the longest time between two steps, in seconds"
        )

    def _write(self) -> None:
        outcomes = [
            {k: v for k, v in asdict(verdict).items() if k != "trace"} for verdict in self.verdicts
        ]
        whole = {
            "cells": len(self.verdicts),
            "passed": len(self.verdicts) - len(self.failed),
            "longest_gap_s": max((v.gap_s for v in self.verdicts), default=0.0),
            "outcomes": outcomes,
        }
        (self._directory / FILE).write_text(json.dumps(whole, indent=1) + "\n")


def _shown(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("·", style="dim")
    sign = _SIGNS.get(verdict.outcome, "?")
    if not verdict.passed:
        return Text(f"✗{sign}", style="bold red")
    gap = f"{verdict.gap_s:.1f}" if verdict.gap_s else ""
    return Text(sign, style=_STYLES[verdict.outcome]).append(gap, style="dim")
