# SPDX-License-Identifier: Apache-2.0
"""A journal on a real SQLite file, and rows for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.messages import MigrationRow, Phase

OWNERS = {"gpt/0": (0, "h0"), "gpt/1": (1, "h1")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Journal:
    made = Journal(path)
    made.add_job("gpt", 1, "10.99.0.0/24", b"spec", OWNERS)
    return made


def row(number: int, capsule: str = "gpt/1", state: str = "done") -> MigrationRow:
    return MigrationRow(
        f"m{number}",
        capsule,
        "h1",
        "h2",
        "asked for",
        "root",
        2,
        state,
        1.0,
        2.0,
        0.5,
        10,
        11,
        12,
        3.5e8,
        [Phase("dump", 0.1, 0.4, 10, True, "a detail")],
        None,
        None,
    )
