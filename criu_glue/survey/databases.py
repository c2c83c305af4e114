# SPDX-License-Identifier: Apache-2.0
"""SQLite databases that are open for writing and whose file would be another one after a move.

A file that goes along is made anew at the destination and gets another inode number there. SQLite
compares the number with the one that it found when it opened the database, before each transaction
that needs a rollback journal, and then refuses to write ("attempt to write a readonly database",
SQLITE_READONLY_DBMOVED: sqlite, src/os_unix.c, fileHasMoved, and src/pager.c, databaseIsUnmoved).
With a write-ahead log it does not look, and on a shared path the number stays what it is. Nor does
it look with the journal in memory or switched off, but a database file does not tell of these.
"""

from __future__ import annotations

import contextlib
import os

from ..files.lent import lent

REMEDY = (
    'write it with a write-ahead log ("PRAGMA journal_mode=WAL"), open it on a path of'
    " files.shared, or close it between transactions"
)
_HEADER = b"SQLite format 3\0"  # https://www.sqlite.org/fileformat2.html, 1.3
_WRITE_VERSION, _ROLLBACK = 18, 1


def refuses_after_a_move(pid: int, fd: int) -> bool:
    """Whether a process has a database open there to which SQLite would not write at another host.

    One that is still empty is not known for a database.
    """
    with contextlib.suppress(OSError):
        ours = lent(pid, fd)
        try:
            head = os.pread(ours, _WRITE_VERSION + 1, 0)
        finally:
            os.close(ours)
        return head.startswith(_HEADER) and head[_WRITE_VERSION:] == bytes([_ROLLBACK])
    return False


def words(who: str, path: str) -> str:
    return (
        f"{who} has the SQLite database {path} open, to which SQLite refuses to write once the"
        " file has another inode number"
    )
