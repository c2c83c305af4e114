# SPDX-License-Identifier: Apache-2.0
"""Every marker of tests is used, and says something to a make target or to what skips tests."""

from __future__ import annotations

import re
import tomllib

import pytest
from checkout import ROOT


def markers() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["pytest"]["ini_options"]["markers"]
    return [re.split(r"[:(]", line)[0] for line in declared]


@pytest.mark.parametrize("marker", markers())
def test_it_is_used_and_read(marker: str) -> None:
    tests = [f for top in ("tests", "integration") for f in (ROOT / top).rglob("test_*.py")]
    using = rf"^\s*@?(?:pytestmark = .*)?.*pytest\.mark\.{marker}\b"
    assert any(re.search(using, f.read_text(), re.MULTILINE) for f in tests), "no test has it"
    chosen = re.findall(r"-m '([^']*)'|-m (\w+)", (ROOT / "Makefile").read_text())
    (needs,) = (ROOT / "tests").rglob("machine_needs.py")
    in_target = any(re.search(rf"\b{marker}\b", part) for pair in chosen for part in pair)
    assert in_target or f'"{marker}"' in needs.read_text(), "no target selects by it"
