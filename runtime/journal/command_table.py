# SPDX-License-Identifier: Apache-2.0
"""The part of the journal about commands that the orchestrator runs after rewinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from .journal_file import JournalFile

SCHEMA = """
CREATE TABLE IF NOT EXISTS commands (
    number INTEGER PRIMARY KEY, job TEXT, begun INTEGER, variables BLOB);
"""
"""``number``: of the rewind (RewindRow). A command has a row until its end is known."""


class CommandRow(NamedTuple):
    """A command that has not ended. ``variables``: of its environment."""

    number: int
    job: str
    begun: bool
    variables: dict[str, str]


class CommandTable:
    """The journal has one instance. It keeps a row for each command of ``snapshots.on_rewind``,
    from the end of its rewind until the command's end is known. Every method raises JournalError;
    then nothing has changed."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    def add(self, number: int, job: str, variables: Mapping[str, str]) -> None:
        """Record that a command is due."""
        row = (number, job, msgspec.msgpack.encode(variables))
        self._file.write("INSERT OR REPLACE INTO commands VALUES (?, ?, 0, ?)", row)

    def rows(self) -> list[CommandRow]:
        """Return the commands that have not ended, oldest first."""
        found = self._file.rows("SELECT * FROM commands ORDER BY number")
        return [
            CommandRow(number, job, bool(begun), msgspec.msgpack.decode(of, type=dict[str, str]))
            for number, job, begun, of in found
        ]

    def begin(self, number: int) -> None:
        """Record that a command begins. From now on no orchestrator begins it again."""
        self._file.write("UPDATE commands SET begun = 1 WHERE number = ?", (number,))

    def begin_all(self) -> None:
        """Take all commands to have begun: the journal was put back, and they may have been run
        since the backup."""
        self._file.write("UPDATE commands SET begun = 1")

    def end(self, number: int) -> None:
        """Record that a command has ended. Repeatable."""
        self._file.write("DELETE FROM commands WHERE number = ?", (number,))
