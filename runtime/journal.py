# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's journal: what is true of the cluster, durable before it is said.

SQLite in WAL mode with synchronous=FULL: when a method returns, the power may fail. Which host
owns a capsule is one row, and :meth:`Journal.commit` the one write that passes it on.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ..errors import LiveshiftError
from .messages import Event, MigrationRow

VERSION = 2
"""Of the schema (PRAGMA user_version)."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, vni INTEGER UNIQUE, subnet TEXT, spec BLOB, started REAL,
    state TEXT, code INTEGER);
CREATE TABLE IF NOT EXISTS capsules (
    name TEXT PRIMARY KEY, job TEXT, number INTEGER, host TEXT, epoch INTEGER, code INTEGER,
    granted INTEGER);
CREATE TABLE IF NOT EXISTS last_epochs (job TEXT PRIMARY KEY, epoch INTEGER);
CREATE TABLE IF NOT EXISTS taints (host TEXT PRIMARY KEY, reason TEXT, by TEXT);
CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, state TEXT, row BLOB);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, time REAL, subject TEXT, kind TEXT, text TEXT, by TEXT,
    migration INTEGER);
"""


class Journal:
    """One file; for one thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds the jobs' environments
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._check_version(path)
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version={VERSION}")
        except sqlite3.Error as error:
            raise LiveshiftError(f"cannot open the journal {path}: {error}") from error

    def _check_version(self, path: Path) -> None:
        tables = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if tables and found != VERSION:
            raise LiveshiftError(
                f"the journal {path} has format {found}, this version writes format {VERSION}",
                hint="let the jobs end under the version that wrote it, then move the file away",
            )

    # ---- jobs ----

    def add_job(
        self, name: str, vni: int, subnet: str, spec: bytes, owners: dict[str, tuple[int, str]]
    ) -> tuple[float, int]:
        """A new job and its capsules, name → (index, host). Returns (now, their first epoch).

        That is above every epoch which an earlier job of the name had: a host that missed the
        end of that one must not take its epochs for newer.
        """
        now = time.time()
        with self.together():
            self._db.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, 'running', NULL)",
                (name, vni, subnet, spec, now),
            )
            query = "SELECT COALESCE(MAX(epoch), 0) + 1 FROM last_epochs WHERE job = ?"
            first = int(self._db.execute(query, (name,)).fetchone()[0])
            self._db.executemany(
                "INSERT INTO capsules VALUES (?, ?, ?, ?, ?, NULL, 1)",
                [(c, name, index, host, first) for c, (index, host) in owners.items()],
            )
        return now, first

    def jobs(self) -> list[tuple[str, int, str, bytes, float, str, int | None]]:
        return self._db.execute("SELECT * FROM jobs ORDER BY started").fetchall()

    def remove_job(self, name: str) -> None:
        with self.together():
            self._db.execute(
                "INSERT OR REPLACE INTO last_epochs"
                " SELECT job, MAX(epoch) FROM capsules WHERE job = ? GROUP BY job",
                (name,),
            )
            self._db.execute("DELETE FROM jobs WHERE name = ?", (name,))
            self._db.execute("DELETE FROM capsules WHERE job = ?", (name,))

    def last_epoch(self, job: str) -> int:
        """The highest epoch of a job of that name that was forgotten; 0 when there was none."""
        query = "SELECT COALESCE(MAX(epoch), 0) FROM last_epochs WHERE job = ?"
        return int(self._db.execute(query, (job,)).fetchone()[0])

    def set_job(self, name: str, state: str, code: int | None) -> None:
        self._db.execute("UPDATE jobs SET state = ?, code = ? WHERE name = ?", (state, code, name))

    # ---- capsules and who owns them ----

    def capsules(self, job: str) -> list[tuple[str, str, int, str, int, int | None, int]]:
        query = "SELECT * FROM capsules WHERE job = ? ORDER BY number"
        return self._db.execute(query, (job,)).fetchall()

    def set_ended(self, capsule: str, code: int) -> None:
        self._db.execute("UPDATE capsules SET code = ? WHERE name = ?", (code, capsule))

    def commit(self, capsule: str, host: str, epoch: int) -> None:
        """Pass a capsule to ``host`` under ``epoch``, which must be the next one.

        This is the commit of a migration: before it returns only the old owner may run the
        capsule, afterwards only the new one, once it was granted.
        """
        done = self._db.execute(
            "UPDATE capsules SET host = ?, epoch = ?, granted = 0"
            " WHERE name = ? AND epoch = ? - 1 AND code IS NULL",
            (host, epoch, capsule, epoch),
        )
        if done.rowcount != 1:
            raise LiveshiftError(f"{capsule} is not owned under epoch {epoch - 1} any more")

    def grant(self, capsule: str, host: str, epoch: int) -> None:
        """The owner may run it from now on."""
        done = self._db.execute(
            "UPDATE capsules SET granted = 1 WHERE name = ? AND host = ? AND epoch = ?",
            (capsule, host, epoch),
        )
        if done.rowcount != 1:
            raise LiveshiftError(f"{capsule} is not {host}'s under epoch {epoch}")

    # ---- taints ----

    def taints(self) -> dict[str, tuple[str, str]]:
        """host → (reason, by)."""
        rows = self._db.execute("SELECT * FROM taints").fetchall()
        return {host: (reason, by) for host, reason, by in rows}

    def set_taint(self, host: str, reason: str, by: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO taints VALUES (?, ?, ?)", (host, reason, by))

    def clear_taint(self, host: str) -> None:
        self._db.execute("DELETE FROM taints WHERE host = ?", (host,))

    # ---- history ----

    def next_migration(self) -> int:
        row = self._db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM migrations").fetchone()
        return int(row[0])

    def save_migration(self, number: int, row: MigrationRow) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO migrations VALUES (?, ?, ?)",
            (number, row.state, msgspec.msgpack.encode(row)),
        )

    def migrations_not_in(self, states: Iterable[str]) -> list[tuple[int, MigrationRow]]:
        """Migrations that were left in another state than these."""
        over = list(states)
        query = "SELECT number, row FROM migrations WHERE state NOT IN ({})"
        rows = self._db.execute(query.format(", ".join("?" * len(over))), over).fetchall()
        return [(n, msgspec.msgpack.decode(row, type=MigrationRow)) for n, row in rows]

    def migrations_in(self, state: str, most: int) -> list[MigrationRow]:
        """The last migrations that are in this state, newest first."""
        query = "SELECT row FROM migrations WHERE state = ? ORDER BY number DESC LIMIT ?"
        rows = self._db.execute(query, (state, most)).fetchall()
        return [msgspec.msgpack.decode(row, type=MigrationRow) for (row,) in rows]

    def migration(self, number: int) -> MigrationRow | None:
        found = self._db.execute(
            "SELECT row FROM migrations WHERE number = ?", (number,)
        ).fetchone()
        return msgspec.msgpack.decode(found[0], type=MigrationRow) if found else None

    def tell(
        self, subject: str, kind: str, text: str, by: str = "", migration: int | None = None
    ) -> None:
        """Add a line to the history."""
        self._db.execute(
            "INSERT INTO events (time, subject, kind, text, by, migration)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (time.time(), subject, kind, text, by, migration),
        )

    def events(self, subject: str, after: int) -> list[Event]:
        """The history of a job (with its capsules), a capsule or a host; all of it for ''."""
        where = "number > ?"
        values: list[object] = [after]
        if subject:
            where += (
                " AND (subject = ? OR subject LIKE ? OR migration IN (SELECT migration FROM events"
                " WHERE subject = ?))"
            )
            values += [subject, subject + "/%", subject]
        rows = self._db.execute(
            f"SELECT * FROM events WHERE {where} ORDER BY number",
            values,
        ).fetchall()
        return [
            Event(number, at, about, kind, text, by, self.migration(m) if m else None)
            for number, at, about, kind, text, by, m in rows
        ]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Writes within are made all of them or none, and wait for the disk once."""
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise
