# SPDX-License-Identifier: Apache-2.0
"""A journal on a disk that is full, and has room again."""

from __future__ import annotations

import contextlib
from typing import Any

from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.journal.journal_file import JournalError


def fill(journal: Journal) -> None:
    """From now on SQLite says what it says on a full disk."""
    file: Any = journal.file
    (pages,) = file.rows("PRAGMA page_count")[0]
    file.rows(f"PRAGMA max_page_count={pages}")
    for size in (1000, 1):  # the last page, too
        with contextlib.suppress(JournalError):
            while True:
                journal.add_event("", "filler", "x" * size)


def empty(journal: Journal) -> None:
    journal.file.rows("PRAGMA max_page_count=1000000")
