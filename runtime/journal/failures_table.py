# SPDX-License-Identifier: Apache-2.0
"""The part of the journal about how often hosts have failed (model/failures.py)."""

from __future__ import annotations

from ..model.failures import FailuresSeen
from .journal_file import JournalFile

SCHEMA = """
CREATE TABLE IF NOT EXISTS failures (
    one INTEGER PRIMARY KEY CHECK (one = 1), losses REAL, hours REAL);
"""
"""One row at most."""


class FailuresTable:
    """The journal has one instance. It keeps the FailuresSeen of the cluster: the losses of hosts
    or ranks, and the hours of the hosts that ran protected jobs. Both methods raise JournalError;
    then nothing has changed."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def seen(self) -> FailuresSeen:
        rows = self._file.rows("SELECT losses, hours FROM failures")
        return FailuresSeen(*rows[0]) if rows else FailuresSeen()

    def write(self, seen: FailuresSeen) -> None:
        """Replace what was seen. Raises LiveshiftError."""
        self._file.write(
            "INSERT OR REPLACE INTO failures VALUES (1, ?, ?)", (seen.losses, seen.hours)
        )
