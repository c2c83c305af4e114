# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's journal: what is true of the cluster, durable before it is said.

SQLite in WAL mode with synchronous=FULL: when a method returns, the power may fail. Which host
owns a capsule is one row, and :meth:`Journal.commit` the one write that passes it on.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import msgspec

from ..errors import LiveshiftError
from .messages import Event, MigrationRow

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, vni INTEGER UNIQUE, subnet TEXT, spec BLOB, started REAL,
    state TEXT, code INTEGER);
CREATE TABLE IF NOT EXISTS capsules (
    name TEXT PRIMARY KEY, job TEXT, number INTEGER, host TEXT, epoch INTEGER, code INTEGER);
CREATE TABLE IF NOT EXISTS taints (host TEXT PRIMARY KEY, reason TEXT, by TEXT);
CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, row BLOB);
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
            self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise LiveshiftError(f"cannot open the journal {path}: {error}") from error

    # ---- jobs and who owns what ----

    def add_job(
        self, name: str, vni: int, subnet: str, spec: bytes, owners: dict[str, tuple[int, str]]
    ) -> float:
        """A new job and its capsules, all under epoch 1: name → (index, host). Returns now."""
        now = time.time()
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, 'running', NULL)",
                (name, vni, subnet, spec, now),
            )
            self._db.executemany(
                "INSERT INTO capsules VALUES (?, ?, ?, ?, 1, NULL)",
                [(c, name, index, host) for c, (index, host) in owners.items()],
            )
            self._db.execute("COMMIT")
        return now

    def jobs(self) -> list[tuple[str, int, str, bytes, float, str, int | None]]:
        return self._db.execute("SELECT * FROM jobs ORDER BY started").fetchall()

    def capsules(self, job: str) -> list[tuple[str, str, int, str, int, int | None]]:
        query = "SELECT * FROM capsules WHERE job = ? ORDER BY number"
        return self._db.execute(query, (job,)).fetchall()

    def remove_job(self, name: str) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM jobs WHERE name = ?", (name,))
            self._db.execute("DELETE FROM capsules WHERE job = ?", (name,))
            self._db.execute("COMMIT")

    def set_job(self, name: str, state: str, code: int | None) -> None:
        self._db.execute("UPDATE jobs SET state = ?, code = ? WHERE name = ?", (state, code, name))

    def set_ended(self, capsule: str, code: int) -> None:
        self._db.execute("UPDATE capsules SET code = ? WHERE name = ?", (code, capsule))

    def commit(self, capsule: str, host: str, epoch: int) -> None:
        """Pass a capsule to ``host`` under ``epoch``, which must be the next one.

        This is the commit of a migration: before it returns only the old owner may run the
        capsule, afterwards only the new one.
        """
        done = self._db.execute(
            "UPDATE capsules SET host = ?, epoch = ? WHERE name = ? AND epoch = ? - 1",
            (host, epoch, capsule, epoch),
        )
        if done.rowcount != 1:
            raise LiveshiftError(f"{capsule} is not owned under epoch {epoch - 1} any more")

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
            "INSERT OR REPLACE INTO migrations VALUES (?, ?)",
            (number, msgspec.msgpack.encode(row)),
        )

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
