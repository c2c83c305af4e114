# SPDX-License-Identifier: Apache-2.0
"""The table of `make coverage`, and its floors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import ROOT
from repository_scripts import script

coverage_table = script("coverage_table")


def report(tmp_path: Path, **percent: int) -> list[str]:
    """What ``coverage json`` writes, of folders with two files each; "__" stands for a slash."""
    every = dict.fromkeys(coverage_table.FLOORS, 100)
    every |= {name.replace("__", "/"): count for name, count in percent.items()}
    files = {}
    for folder, count in every.items():
        for name, run in (("a", count), ("b", 100)):
            numbers = {"num_statements": 80, "covered_lines": min(run, 80)}
            numbers |= {"num_branches": 20, "covered_branches": max(0, run - 80)}
            files[f"{folder}/{name}.py"] = {"summary": numbers}
    (tmp_path / "coverage.json").write_text(json.dumps({"files": files}))
    return [str(tmp_path / "coverage.json")]


def test_a_folder_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage_table.main(report(tmp_path, runtime__agent=30)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "runtime/agent 110 of 160 20 of 40 65.0 %" in map(" ".join, rows)
    assert rows[-1][0] == "all"
    assert next(row for row in rows if row[0] == "runtime/model")[-2:] == ["98", "%"]


def test_a_pure_folder_has_a_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage_table.main(report(tmp_path, runtime__model=90)) == 1
    assert capsys.readouterr().err == "error: the tests run 95.0 % of runtime/model, not 98 %\n"
    (tmp_path / "coverage.json").write_text('{"files": {}}')
    assert coverage_table.main([str(tmp_path / "coverage.json")]) == 1, "it is measured at all"


def test_the_folders_with_a_floor_are_there() -> None:
    for folder in coverage_table.FLOORS:
        assert list((ROOT / folder).glob("*.py")), folder
