# SPDX-License-Identifier: Apache-2.0
"""The journal's file: SQLite with durable writes, clear error messages, and a backup beside it.

SQLite's online backup makes the backup, so it is consistent even if the journal is written
meanwhile (https://www.sqlite.org/backup.html). The backup carries a mark (PRAGMA application_id).
A journal that has the mark when it is opened was restored from a backup: it lacks later changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ... import units
from ...errors import LiveshiftError

MARK = 0x6C73626B
"""A backup has this application_id, "lsbk" in ASCII."""

LITTLE = 1 << 20
"""With fewer free bytes than this, we take an I/O error for a full disk."""


class JournalError(LiveshiftError):
    """The journal cannot be opened, read or written; the failed write has changed nothing."""


class JournalFile:
    """One SQLite file. Only one thread may use it, but any thread may call :meth:`back_up`.

    ``problem``: why the last write failed, as text; "" if it succeeded. ``restored``: the file was
    restored from a backup, and :meth:`forget_mark` was not called yet.
    """

    def __init__(self, path: Path, schema: str, version: int, readable: Sequence[int]) -> None:
        self.path = path
        self.backup = path.with_name("journal.backup")
        self.problem = ""
        if not path.exists() and self.backup.exists():
            raise JournalError(f"the journal {path} is gone", hint=self._way_back())
        new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # it holds the jobs' environments
            self._db = sqlite3.connect(path, isolation_level=None)
            self._opened = path.stat()
        except (sqlite3.Error, OSError) as error:
            raise self._in_words(error, "opened") from error
        try:
            self._open(schema, version, readable)
        except (sqlite3.Error, JournalError) as error:
            self.close()
            if new:
                path.unlink()
            if isinstance(error, JournalError):
                raise
            raise self._in_words(error, "opened") from error

    def _open(self, schema: str, version: int, readable: Sequence[int]) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        tables = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if tables and found not in readable:
            raise JournalError(
                f"the journal {self.path} has format {found}, this version reads"
                f" {' and '.join(map(str, readable))}",
                hint="let the jobs end under the version that wrote it, then move the file away",
            )
        self._db.executescript(schema)
        self._db.execute(f"PRAGMA user_version={version}")
        self.restored = self._db.execute("PRAGMA application_id").fetchone()[0] == MARK

    def close(self) -> None:
        """Close the database; after this, nothing can be read or written."""
        self._db.close()

    # ---- reading and writing ----

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows that a query finds. Raises JournalError."""
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._in_words(error, "read") from error

    def each(self, query: str, values: Sequence[Any] = ()) -> Generator[Any, None, None]:
        """Iterate over the rows that a query finds; none is read before it is asked for. Close it
        at once: an open read keeps the WAL from being emptied. Raises JournalError."""
        try:
            with contextlib.closing(self._db.execute(query, values)) as cursor:
                yield from cursor
        except sqlite3.Error as error:
            raise self._in_words(error, "read") from error

    def write(self, query: str, values: Sequence[Any] = ()) -> int:
        """Change rows and return how many. Outside of :meth:`together` the change is durable on
        return. Raises JournalError; then nothing has changed."""
        with self._writing():
            return self._db.execute(query, values).rowcount

    def write_all(self, query: str, values: Iterable[Sequence[Any]]) -> None:
        """Run the query once for each of ``values``; durable and raising as :meth:`write` is."""
        with self._writing():
            self._db.executemany(query, values)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make all writes in this block or none of them, and wait for the disk once.

        A nested block is part of the outer one: nothing is durable before the outer block ends.
        """
        if self._db.in_transaction:
            yield
            return
        self.write("BEGIN")
        try:
            yield
            self.write("COMMIT")
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        if self._db.in_transaction:  # a full disk may have ended the transaction already
            self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._check_there()
            yield
        except sqlite3.Error as error:
            failure = self._in_words(error, "written")
            self.problem = str(failure)
            raise failure from error
        except JournalError as error:
            self.problem = str(error)
            raise
        self.problem = ""

    def _check_there(self) -> None:
        """Raise JournalError unless the file at the path is the one that is open. SQLite goes on
        with a file that was removed: each write succeeds, and is lost when the daemon ends."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), self._opened):
                return
        raise JournalError(
            f"the journal {self.path} is gone, or another file is in its place",
            hint="if it was moved away, move it back; otherwise stop the orchestrator."
            f" Then {self._way_back()}",
        )

    # ---- when something is wrong with it ----

    def _in_words(self, error: Exception, what: str) -> JournalError:
        name = getattr(error, "sqlite_errorname", "")
        free, disk = _free_at(self.path.parent)
        full = "FULL" in name or (("IOERR" in name or "CANTOPEN" in name) and free < LITTLE)
        if full or (isinstance(error, OSError) and free < LITTLE):
            return JournalError(
                f"the journal {self.path} cannot be {what}: the disk at {disk} is full"
                f" ({units.size(free)} are free)",
                hint=f"free some space at {disk} and try again; nothing was changed, jobs go on",
            )
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError | sqlite3.IntegrityError
        ):
            return JournalError(
                f"the journal {self.path} is damaged: {error}", hint=self._way_back()
            )
        return JournalError(f"the journal {self.path} cannot be {what}: {error}")

    def _way_back(self) -> str:
        """Say what a person can do when the file is missing or damaged."""
        away = f"move {self.path.name}* away from {self.path.parent}"
        if not self.backup.exists():
            return (
                f"there is no backup: {away} and start with an empty journal; `liveshift status`"
                " then shows what hosts run as unknown, and `liveshift stop --unknown` ends it"
            )
        made = units.moment(self.backup.stat().st_mtime)
        return (
            f"{away}, copy {self.backup} (of {made}) to {self.path} and start the orchestrator; it"
            " asks the hosts for what has happened since. Jobs go on meanwhile"
        )

    # ---- the backup ----

    @property
    def changes(self) -> int:
        """How many rows were changed since the file was opened."""
        return self._db.total_changes

    def back_up(self) -> None:
        """Write a new backup. Blocks; may be called in any thread.

        Raises JournalError; then the earlier backup is unchanged.
        """
        new = self.backup.with_suffix(".new")
        try:
            self._check_there()  # to open another file at this path would remove our journal's log
            new.unlink(missing_ok=True)
            new.touch(mode=0o600)
            with (
                contextlib.closing(self._opened_again()) as ours,
                contextlib.closing(sqlite3.connect(new)) as copy,
            ):
                ours.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
                copy.execute(f"PRAGMA application_id={MARK}")
            with new.open("rb") as written:
                os.fsync(written.fileno())
            self._check_there()  # only now it is known whose copy it is
            new.replace(self.backup)
        except (sqlite3.Error, OSError, JournalError) as error:
            new.unlink(missing_ok=True)
            raise JournalError(
                f"cannot back the journal up to {self.backup}: {error}",
                hint=error.hint if isinstance(error, JournalError) else None,
            ) from error

    def _opened_again(self) -> sqlite3.Connection:
        """Open the file for another thread. By its path alone SQLite would make one that is gone
        anew, empty, and an empty backup of it."""
        return sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", uri=True)

    def forget_mark(self) -> None:
        """Remove the backup's mark, once the journal has caught up with what the hosts run."""
        self.write("PRAGMA application_id=0")
        self.restored = False


def _free_at(path: Path) -> tuple[int, Path]:
    """Return the free bytes on the file system of ``path``, and its mount point."""
    disk = next((p for p in (path, *path.parents) if p.exists() and os.path.ismount(p)), Path("/"))
    there = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(there).free, disk
