# SPDX-License-Identifier: Apache-2.0
"""The page and the file of the fault matrix have both of its tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

from fault_matrix import snapshot_table, table
from fault_matrix.report import FILE, Report
from fault_matrix.tables import LOOKS, all_cells
from fault_matrix.verdict import Verdict
from rich.console import Console


def test_both_tables_are_played_and_the_same_words_pick_cells_of_both() -> None:
    every = all_cells("", False)
    assert [cell.table for cell in every] == sorted(cell.table for cell in every)
    assert {cell.table for cell in every} == set(LOOKS)
    assert len({(cell.table, cell.name) for cell in every}) == len(every)
    stalled = {(cell.table, cell.name) for cell in all_cells("*/orchestrator-stalled", False)}
    assert ("moves", "source.dumped/orchestrator-stalled") in stalled
    assert ("snapshots", "suspended/orchestrator-stalled") in stalled
    assert all(cell.point in LOOKS[cell.table].points for cell in every)


def test_the_page_and_the_file_have_both_tables(tmp_path: Path) -> None:
    page = io.StringIO()
    report = Report(tmp_path, Console(file=page, width=Report.WIDTH))
    verdicts = [
        Verdict(
            table.TABLE, "source.dumped", "dump-killed", table.STAYED, table.STAYED, True, gap_s=1.5
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
    moves, _, snapshots = said.partition("\nsnapshots ")
    assert "dump-killed" in moves
    assert "=1.5" in moves
    assert "holder-power-lost" in snapshots
    assert "✗?" in snapshots
    assert "† lost" in snapshots
    assert [verdict.fault for verdict in report.failed] == ["owner-cut-off"]
    trace = (tmp_path / "fault-matrix-rewind.ended-owner-cut-off.txt").read_text()
    assert "what was seen" in trace
    whole = json.loads((tmp_path / FILE).read_text())
    assert (whole["cells"], whole["passed"]) == (3, 2)
    assert whole["tables"] == {
        "moves": {"cells": 1, "passed": 1},
        "snapshots": {"cells": 2, "passed": 1},
    }
    assert [each["table"] for each in whole["outcomes"]] == ["moves", "snapshots", "snapshots"]
