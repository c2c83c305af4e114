# SPDX-License-Identifier: Apache-2.0
"""How often hosts have failed outlives the orchestrator; an earlier journal gets the table."""

from __future__ import annotations

from pathlib import Path

from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.model.failures import NOTHING_SEEN, FailuresSeen


def test_what_was_seen_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    assert journal.failures.seen() == NOTHING_SEEN
    for seen in (FailuresSeen(1, 0.25), FailuresSeen(2.5, 512.0)):
        journal.failures.write(seen)
        assert journal.failures.seen() == seen
    journal.file.close()
    again = Journal(path)
    assert again.failures.seen() == FailuresSeen(2.5, 512.0)
    again.file.close()


def test_a_journal_without_the_table_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    old = Journal(path)
    old.file.write("DROP TABLE failures")
    old.file.close()
    journal = Journal(path)
    assert journal.failures.seen() == NOTHING_SEEN
    journal.failures.write(FailuresSeen(1, 2.0))
    journal.file.close()
