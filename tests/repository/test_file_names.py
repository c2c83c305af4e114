# SPDX-License-Identifier: Apache-2.0
"""A test is found by the name of its file, so no two files have the same."""

from __future__ import annotations

from collections import Counter

from checkout import ROOT


def test_names_of_test_files_are_unique() -> None:
    files = [path for top in ("tests", "integration") for path in (ROOT / top).rglob("test_*.py")]
    assert len(files) > 400
    names = Counter(path.name for path in files)
    assert [name for name, number in names.items() if number > 1] == []
