# SPDX-License-Identifier: Apache-2.0
"""The page and the file of the fault matrix have all of its tables."""

from __future__ import annotations

import io
import json
from itertools import groupby
from pathlib import Path

from fault_matrix import forced_ways, snapshot_table, table
from fault_matrix.report import FILE, Report
from fault_matrix.tables import LOOKS, all_cells
from fault_matrix.verdict import Verdict
from rich.console import Console


def test_all_tables_are_played_and_the_same_words_pick_cells_of_all() -> None:
    every = all_cells("", False)
    assert list(dict.fromkeys(cell.table for cell in every)) == list(LOOKS)
    assert [table for table, _ in groupby(cell.table for cell in every)] == list(LOOKS)
    assert len({(cell.table, cell.name) for cell in every}) == len(every)
    stalled = {(cell.table, cell.name) for cell in all_cells("*/orchestrator-stalled", False)}
    assert ("moves", "source.dumped/orchestrator-stalled") in stalled
    assert ("snapshots", "suspended/orchestrator-stalled") in stalled
    forced = {cell.table for cell in all_cells("stop:*/dump-killed", False)}
    assert forced == {"forced ways"}
    assert all(cell.point in LOOKS[cell.table].points for cell in every)


def test_the_page_and_the_file_have_all_tables(tmp_path: Path) -> None:
    page = io.StringIO()
    report = Report(tmp_path, Console(file=page, width=Report.WIDTH))
    verdicts = [
        Verdict(
            table.TABLE, "source.dumped", "dump-killed", table.STAYED, table.STAYED, True, gap_s=1.5
        ),
        Verdict(
            forced_ways.TABLE,
            "stop:source.dumped",
            "dump-killed",
            table.STAYED,
            table.MOVED,
            error="it moved",
        ),
        Verdict(
            snapshot_table.TABLE,
            "suspended",
            "holder-power-lost",
            snapshot_table.LOST,
            snapshot_table.LOST,
            True,
        ),
        Verdict(
            snapshot_table.TABLE,
            "rewind.ended",
            "owner-cut-off",
            snapshot_table.REWOUND,
            error="TWO RUN",
            trace="what was seen",
        ),
    ]
    for number, verdict in enumerate(verdicts, 1):
        report.take(verdict, number, len(verdicts))
    report.show_tables()
    said = page.getvalue()
    moves, _, rest = said.partition("\nforced ways ")
    ways, _, snapshots = rest.partition("\nsnapshots ")
    assert "dump-killed" in moves
    assert "=1.5" in moves
    assert "1 stop:source.dumped\n" in ways
    assert "✗→" in ways
    assert "holder-power-lost" in snapshots
    assert "✗?" in snapshots
    assert "† lost" in snapshots
    assert [verdict.fault for verdict in report.failed] == ["dump-killed", "owner-cut-off"]
    trace = (tmp_path / "fault-matrix-rewind.ended-owner-cut-off.txt").read_text()
    assert "what was seen" in trace
    whole = json.loads((tmp_path / FILE).read_text())
    assert (whole["cells"], whole["passed"]) == (4, 2)
    assert whole["tables"] == {
        "moves": {"cells": 1, "passed": 1},
        "forced ways": {"cells": 1, "passed": 0},
        "snapshots": {"cells": 2, "passed": 1},
    }
    assert [each["table"] for each in whole["outcomes"]] == [
        "moves",
        "forced ways",
        "snapshots",
        "snapshots",
    ]
