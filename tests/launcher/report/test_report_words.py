# SPDX-License-Identifier: Apache-2.0
"""The report's tables of phases and its figures in words."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from report_scene import migration
from rich.console import Console

from liveshift.launcher.report import quantities as q
from liveshift.launcher.report.phases import phase_table
from liveshift.launcher.report.record import ReportedMigration
from liveshift.launcher.show import moves
from liveshift.runtime.messages import MigrationRow, Phase, Rounds

__all__ = ["migration"]


def test_phase_table_has_all_rows(migration: ReportedMigration) -> None:
    console = Console(width=110, record=True, file=StringIO())
    table = phase_table(migration)
    console.print(table)
    shown = console.export_text()
    names = list(table.columns[0].cells)
    assert names == ["prepare", "dump", "restore", "finish", "unaccounted", "total"]
    assert re.search(r"dump\W+0\.400\W+30 %\W+246 MB\W+frozen", shown)
    assert re.search(r"unaccounted\W+0\.070\W+5\.2 %", shown)
    assert re.search(r"total\W+1\.350\W+100 %\W+875 MB\W+frozen 0\.880 s", shown)


def test_the_total_of_events_counts_what_went_ahead() -> None:
    ahead = Rounds(4, 782_000_000, 0, 0, 1.0)
    row = MigrationRow(
        "m1",
        "gpt/1",
        "h1",
        "h2",
        "",
        "root",
        2,
        "done",
        0.0,
        1.0,
        0.5,
        93_000_000,
        0,
        0,
        0.0,
        [],
        None,
        None,
        precopy=ahead,
    )
    console = Console(width=110, record=True, file=StringIO())
    console.print(moves.phase_table(row))
    assert re.search(r"total\W+1\.000\W+100 %\W+875 MB", console.export_text())


def test_a_phase_table_prints_brackets_as_they_are(migration: ReportedMigration) -> None:
    odd = replace(migration, capsule="[red]x[/red]", phases=(Phase("[b]dump", 0.0, 1.0),))
    console = Console(width=110, record=True, file=StringIO())
    console.print(phase_table(odd))
    shown = console.export_text()
    assert "[red]x[/red]" in shown
    assert "[b]dump" in shown


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 s"), (0.0001, "< 1 ms"), (0.0412, "0.041 s"), (1.234, "1.23 s"), (214.4, "214 s")],
)
def test_seconds(value: float, words: str) -> None:
    assert q.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (246_400_000, "246 MB"),
        (999_600_000, "1.00 GB"),
        (3.2e12, "3.20 TB"),
    ],
)
def test_size(value: float | None, words: str) -> None:
    assert q.size(value) == words
