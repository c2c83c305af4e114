# SPDX-License-Identifier: Apache-2.0
"""What errors say, read from the source: one unit system, and an actor that is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from liveshift import errors

PACKAGE = Path(errors.__file__).parent
BAD = re.compile(r"\b[KMGT]iB\b|\b(?:nobody|somebody|whoever)\b|\bst(?:and|ands|ood) still\b", re.I)
ERRORS = {name for name, made in vars(errors).items() if isinstance(made, type)}
MAKERS = {"fail", "refusal", "_refusal", "_failed", "_error", "_not_theirs", "_forbidden", "Unfit"}
"""Functions and classes of other modules that make an error of the words given."""
WORDS = {"hint", "message", "remedy", "advice", "why", "expected"}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each literal that an error or a hint is made of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from literals(node.exc)
        if isinstance(node, ast.Call):
            named = node.func
            name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
            if name in ERRORS | MAKERS or name.endswith(("Error", "Failed", "Refused")):
                yield from literals(node)
            for keyword in node.keywords:
                if keyword.arg in WORDS:
                    yield from literals(keyword.value)


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value


def test_the_reader_finds_what_it_looks_for() -> None:
    source = (
        'raise Refused(f"a store of {n} MiB", hint="x")\n'
        'made = StepFailed("ship", "it stood still")\n'
        'tell(hint="nobody is there")\n'
        'log.info("somebody")\n'
    )
    found = [text for _, text in texts(source) if BAD.search(text)]
    assert set(found) == {" MiB", "it stood still", "nobody is there"}


@pytest.mark.parametrize(
    "folder", ["criu_glue", "cuda_snapshot", "interposer", "launcher", "runtime"]
)
def test_errors_and_hints_use_decimal_units_and_name_who_acts(folder: str) -> None:
    seen, wrong = 0, set()
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for line, text in texts(path.read_text()):
            seen += 1
            if BAD.search(text):
                wrong.add(f"{path.relative_to(PACKAGE)}:{line}: {text}")
    assert seen > 40, "errors were found"
    assert wrong == set()
