# SPDX-License-Identifier: Apache-2.0
"""Finds open SQLite databases to which SQLite would refuse to write after a move.

A file that moves is made again at the destination and gets another inode number there. Before each
transaction that needs a rollback journal, SQLite compares the number with the one that it found
when it opened the database. If they differ, it refuses to write ("attempt to write a readonly
database", SQLITE_READONLY_DBMOVED: sqlite, src/os_unix.c, fileHasMoved, and src/pager.c,
databaseIsUnmoved). With a write-ahead log SQLite does not compare, and on a shared path the number
stays the same. With the journal in memory or switched off SQLite does not compare either, but a
database file does not show these two modes.
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
    """True if descriptor ``fd`` is a database to which SQLite would not write on another host.

    A database that is still empty is not recognized.
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
