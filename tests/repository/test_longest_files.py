# SPDX-License-Identifier: Apache-2.0
"""`make test` begins with the files that take longest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkout import ROOT
from longest_files import LONGEST, begin_with_longest


def test_the_longest_files_come_first_and_all_others_stay_in_order() -> None:
    names = ["test_a.py", LONGEST[1], "test_b.py", LONGEST[0], "test_a.py"]
    items: list[Any] = [SimpleNamespace(path=Path("tests") / name) for name in names]
    begin_with_longest(items)
    assert [item.path.name for item in items] == [
        *LONGEST[:2],
        "test_a.py",
        "test_b.py",
        "test_a.py",
    ]


def test_there_are_such_files_and_both_workers_keep_the_order() -> None:
    there = {path.name for top in ("tests", "integration") for path in (ROOT / top).rglob("*.py")}
    assert set(LONGEST) <= there
    assert "--dist loadfile --no-loadscope-reorder" in (ROOT / "Makefile").read_text()
