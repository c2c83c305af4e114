# SPDX-License-Identifier: Apache-2.0
"""What is found by its name has a name of its own: files of tests, and classes of the package."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from checkout import ROOT

FOLDERS = ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")


def repeated(names: Iterable[str]) -> list[str]:
    found = Counter(names)
    assert len(found) > 400, "they were looked at"
    return [name for name, number in found.items() if number > 1]


def test_names_of_test_files_are_unique() -> None:
    tops = ("tests", "integration")
    assert repeated(path.name for top in tops for path in (ROOT / top).rglob("test_*.py")) == []


def test_public_classes_of_the_package_have_names_of_their_own() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.parse(path.read_text()).body]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert repeated(name for name in classes if not name.startswith("_")) == []
