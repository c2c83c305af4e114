# SPDX-License-Identifier: Apache-2.0
"""What came of the matrix: a line per cell, its tables at the end, and a file for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import LOOKS, Look
from .verdict import AnyCell, Verdict

FILE = "fault-matrix.json"


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

    def begin(self, cell: AnyCell, number: int, count: int) -> None:
        if self._console.is_terminal:
            self._console.print(f"[dim]{number:3}/{count}  {cell.name} …[/]", end="\r")

    def take(self, verdict: Verdict, number: int, count: int) -> None:
        """One cell is over; a failed one leaves what helps to understand it in a file."""
        self.verdicts.append(verdict)
        self._write()
        _, style = LOOKS[verdict.table].signs.get(verdict.outcome, ("", "red"))
        word = Text(verdict.outcome, style=style)
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

    def skip(self, cell: AnyCell, why: str) -> None:
        self._console.print(f"         {cell.name} cannot be tried here: {why}", soft_wrap=True)

    def show_tables(self) -> None:
        for name, look in LOOKS.items():
            if found := [verdict for verdict in self.verdicts if verdict.table == name]:
                points = [point for point in look.points if any(v.point == point for v in found)]
                self._console.print(_table(name, look, found, points))
                self._console.print(_legend(look, points), soft_wrap=True)

    def _write(self) -> None:
        outcomes = [
            {k: v for k, v in asdict(verdict).items() if k != "trace"} for verdict in self.verdicts
        ]
        whole = {
            **_counts(self.verdicts),
            "tables": {
                name: _counts([verdict for verdict in self.verdicts if verdict.table == name])
                for name in LOOKS
            },
            "longest_gap_s": max((v.gap_s for v in self.verdicts), default=0.0),
            "outcomes": outcomes,
        }
        (self._directory / FILE).write_text(json.dumps(whole, indent=1) + "\n")


def _counts(verdicts: list[Verdict]) -> dict[str, int]:
    return {"cells": len(verdicts), "passed": sum(verdict.passed for verdict in verdicts)}


def _table(name: str, look: Look, verdicts: list[Verdict], points: list[str]) -> Table:
    """Faults down, points across: how each cell ended, its longest gap; ✗ where it failed."""
    table = Table(
        title=name, title_justify="left", box=box.SIMPLE, pad_edge=False, header_style="bold"
    )
    table.add_column("fault", no_wrap=True)
    for number, _ in enumerate(points, 1):
        table.add_column(str(number), no_wrap=True, justify="right")
    for fault in dict.fromkeys(v.fault for v in verdicts):
        found = {v.point: v for v in verdicts if v.fault == fault}
        table.add_row(fault, *(_shown(look, found.get(point)) for point in points))
    return table


def _legend(look: Look, points: list[str]) -> str:
    numbered = ", ".join(f"{number} {point}" for number, point in enumerate(points, 1))
    signs = ", ".join(f"{sign} {outcome}" for outcome, (sign, _) in look.signs.items())
    return f"{numbered}\n{signs}; the longest time between two steps, in seconds"


def _shown(look: Look, verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("·", style="dim")
    sign, style = look.signs.get(verdict.outcome, ("?", ""))
    if not verdict.passed:
        return Text(f"✗{sign}", style="bold red")
    gap = f"{verdict.gap_s:.1f}" if verdict.gap_s else ""
    return Text(sign, style=style).append(gap, style="dim")
