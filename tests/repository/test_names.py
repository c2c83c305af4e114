# SPDX-License-Identifier: Apache-2.0
"""What is found by its name has a name of its own: files of tests, and classes of the package. And
a method's name says what it does, unless only one class has it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from checkout import ROOT

FOLDERS = ("criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime")
VAGUE = ("ask", "look", "settle", "take", "tell")
FILE_LIKE = {"criu_glue/files/trees.py"}
"""``tell`` of what is used as a file has its name from there."""


def repeated(names: Iterable[str]) -> list[str]:
    found = Counter(names)
    assert len(found) > 400, "they were looked at"
    return [name for name, number in found.items() if number > 1]


def test_names_of_test_files_are_unique() -> None:
    tops = ("tests", "integration")
    assert repeated(path.name for top in tops for path in (ROOT / top).rglob("test_*.py")) == []


def classes() -> list[tuple[Path, ast.ClassDef]]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    nodes = [(path, node) for path in files for node in ast.parse(path.read_text()).body]
    return [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]


def test_public_classes_of_the_package_have_names_of_their_own() -> None:
    names = [node.name for _, node in classes()]
    assert repeated(name for name in names if not name.startswith("_")) == []


def test_no_two_classes_have_a_method_with_the_same_vague_name() -> None:
    having = Counter(
        method.name
        for path, node in classes()
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if method.name in VAGUE and str(path.relative_to(ROOT)) not in FILE_LIKE
    )
    assert max(having.values(), default=0) <= 1, having
