# SPDX-License-Identifier: Apache-2.0
"""docs/json.md names every field that ``-o json`` prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_as_the_installed_package_prints() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/json_fields.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_it_shows_what_a_script_looks_for_first() -> None:
    text = (ROOT / "docs/json.md").read_text()
    status = text.partition("## Status\n")[2].partition("\n## ")[0]
    assert "| `jobs` | list of [JobRow](#jobrow) |" in status
    move = text.partition("## MigrationRow\n")[2].partition("\n## ")[0]
    assert "| `frozen_s` | number |" in move
