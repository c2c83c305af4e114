# SPDX-License-Identifier: Apache-2.0
"""Keeps the history, a part of the journal, from growing as long as the cluster lives.

The limit is a number of events, not an age: a clock that is set by mistake removes nothing. What
belongs to a job that `status` still shows stays, however old it is, and so do the last moves, from
which predictions and the history of a host are made.
"""

from __future__ import annotations

from .journal_file import JournalFile

INDEXES = """
CREATE INDEX IF NOT EXISTS events_of_subject ON events (subject);
CREATE INDEX IF NOT EXISTS events_of_migration ON events (migration);
"""
"""SQLite appends the row's number to each entry, so the events of one subject are in order, too. No
format of the journal: a version that does not know them keeps them up to date."""

AT_ONCE = 500
"""One call looks at this many events, which takes some 20 ms: heartbeats wait meanwhile."""

LAST_MOVES = 1000
"""The events of this many last migrations stay, and their rows."""


class OldEvents:
    """The journal has one instance, which removes old events in small steps. It remembers the event
    at which the last step ended, so the caller calls ``remove`` until that returns False."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._looked = 0  # the highest number looked at in this round

    def remove(self, keep: int) -> bool:
        """Look at some events that are older than the last ``keep``, and remove those that are of
        no job in the journal. Return whether there are more to look at; else the next call begins
        anew. Raises JournalError; then nothing is removed."""
        last = self._last("events") - keep
        rows = self._file.rows(
            "SELECT number, subject, migration FROM events WHERE number > ? AND number <= ?"
            " ORDER BY number LIMIT ?",
            (self._looked, last, AT_ONCE),
        )
        if not rows:
            self._looked = 0
            return False
        jobs = {name for (name,) in self._file.rows("SELECT name FROM jobs")}
        last_moves = self._last("migrations") - LAST_MOVES
        gone = [
            (number, move)
            for number, subject, move in rows
            if subject.partition("/")[0] not in jobs and (move is None or move <= last_moves)
        ]
        if gone:
            self._remove([number for number, _ in gone], {move for _, move in gone if move})
        self._looked = rows[-1][0]
        return True

    def _remove(self, events: list[int], moves: set[int]) -> None:
        # A move under way is of a job that the journal has, so all of its events stay.
        unused = (
            "DELETE FROM migrations WHERE number = ? AND NOT EXISTS"
            " (SELECT 1 FROM events WHERE migration = migrations.number)"
        )
        with self._file.together():
            self._file.write_all("DELETE FROM events WHERE number = ?", [(n,) for n in events])
            self._file.write_all(unused, [(move,) for move in sorted(moves)])

    def _last(self, table: str) -> int:
        query = f"SELECT COALESCE(MAX(number), 0) FROM {table}"  # noqa: S608 - a name of ours
        return int(self._file.rows(query)[0][0])
