# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's journal: each fact about the cluster is durable before any daemon or person
learns it.

The journal is SQLite in WAL mode with synchronous=FULL (journal_file.py): once a method has
returned, its write survives a power failure. One row says which host owns a capsule, and only
:meth:`Journal.commit` passes the ownership on. The orchestrator changes its memory after the
journal, never before it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ...errors import LiveshiftError
from ...texts import shortened
from ..messages import Event, MigrationRow
from ..model.steps import ENDS, MigrationStep
from . import command_table, failures_table, old_events, snapshot_tables
from .journal_file import JournalError, JournalFile

log = logging.getLogger("liveshift.journal")

MOVES_OF_A_HOST = 1000
"""A host's history looks for its moves among this many last migrations; it must decode each."""

MOST_EVENTS = 10_000
"""A query for events returns at most this many, the newest ones."""

MOST_BYTES = 32_000_000
"""Their texts and migrations have at most so many bytes; an answer may have 64 MiB."""

MOST_LOOKED = 100_000
"""A query looks at this many events for those that the caller may see."""

MOST_OF_AN_EVENT = 4000
"""A line of the history has at most this many characters, whatever its reason is: what people ask
for is thousands of lines, and one answer has room for 64 MiB."""

NUMBERED = re.compile(r"job([0-9]{1,9})")
LAST_NUMBER = 999_999_999

MOST_EPOCH = 1 << 40
"""More than any job's moves and rewinds come to. A host may say that it has a capsule of a lost job
under any epoch; above this we do not believe it, so that epochs can still count up from there."""

VERSION = 4
"""The format that we write: the tables, and the structures in their blobs (PRAGMA user_version)."""

READABLE = (2, 3, VERSION)
"""The formats that we can read. Fields that an older format lacks get defaults; missing tables are
created."""

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS jobs (
    name TEXT PRIMARY KEY, vni INTEGER UNIQUE, subnet TEXT, spec BLOB, started REAL,
    state TEXT, code INTEGER);
CREATE TABLE IF NOT EXISTS capsules (
    name TEXT PRIMARY KEY, job TEXT, number INTEGER, host TEXT, epoch INTEGER, code INTEGER,
    granted INTEGER);
CREATE TABLE IF NOT EXISTS last_epochs (job TEXT PRIMARY KEY, epoch INTEGER);
CREATE TABLE IF NOT EXISTS taints (host TEXT PRIMARY KEY, reason TEXT, by TEXT);
CREATE TABLE IF NOT EXISTS deadlines (host TEXT PRIMARY KEY, until REAL);
CREATE TABLE IF NOT EXISTS cordons (host TEXT PRIMARY KEY, by TEXT);
CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, state TEXT, row BLOB);
CREATE TABLE IF NOT EXISTS skipped (number INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, time REAL, subject TEXT, kind TEXT, text TEXT, by TEXT,
    migration INTEGER);
"""
    + old_events.INDEXES
    + snapshot_tables.SCHEMA
    + command_table.SCHEMA
    + failures_table.SCHEMA
)


class Journal:
    """One journal in one file; only one thread may use it."""

    def __init__(self, path: Path) -> None:
        self.file = JournalFile(path, SCHEMA, VERSION, READABLE)
        self.together = self.file.together
        self.snapshots = snapshot_tables.SnapshotTables(self.file)
        self.old_events = old_events.OldEvents(self.file)
        self.commands = command_table.CommandTable(self.file)
        self.failures = failures_table.FailuresTable(self.file)

    # ---- jobs ----

    def add_job(
        self, name: str, vni: int, subnet: str, spec: bytes, owners: dict[str, tuple[int, str]]
    ) -> tuple[float, int]:
        """Add a job and its capsules, name → (index, host). Returns (now, their first epoch).

        The first epoch is above all epochs of earlier jobs of the same name: a host that missed the
        end of an earlier job must not take that job's epochs for newer ones.
        """
        now = time.time()
        with self.together():
            self.file.write(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, 'running', NULL)",
                (name, vni, subnet, spec, now),
            )
            first = self.last_epoch(name) + 1
            self.file.write_all(
                "INSERT INTO capsules VALUES (?, ?, ?, ?, ?, NULL, 1)",
                [(c, name, index, host, first) for c, (index, host) in owners.items()],
            )
        return now, first

    def jobs(self) -> list[tuple[str, int, str, bytes, float, str, int | None]]:
        return self.file.rows("SELECT * FROM jobs ORDER BY started")

    def ends(self) -> dict[str, int]:
        """Return the number that the last end of each name of a job has in the history."""
        query = (
            "SELECT subject, MAX(number) FROM events"
            " WHERE kind = 'ended' AND subject IN (SELECT name FROM jobs) GROUP BY subject"
        )
        return dict(self.file.rows(query))

    def starts(self) -> dict[str, int]:
        """Return the number of the first event in the history of each job. Later events of its name
        are its own: numbers only grow, while the clock may be set back."""
        query = (
            "SELECT subject, MAX(number) FROM events"
            " WHERE kind IN ('started', 'adopted') AND subject IN (SELECT name FROM jobs)"
            " GROUP BY subject"
        )
        return dict(self.file.rows(query))

    def begun_by(self, migration: int) -> int:
        """Return the number of the first event of a migration; 0 if the history has none."""
        query = "SELECT COALESCE(MIN(number), 0) FROM events WHERE migration = ?"
        return int(self.file.rows(query, (migration,))[0][0])

    def last_event(self) -> int:
        """Return the number of the last event; 0 if there is none."""
        return int(self.file.rows("SELECT COALESCE(MAX(number), 0) FROM events")[0][0])

    def remove_job(self, name: str) -> None:
        with self.together():
            self.file.write(
                "INSERT OR REPLACE INTO last_epochs"
                " SELECT job, MAX(epoch) FROM capsules WHERE job = ? GROUP BY job",
                (name,),
            )
            self.file.write("DELETE FROM jobs WHERE name = ?", (name,))
            self.file.write("DELETE FROM capsules WHERE job = ?", (name,))
            self.snapshots.remove_job(name)

    def end_unknown(self, job: str, epoch: int) -> None:
        """Record the end of a job that is not in this journal. Its number jobN is not used again,
        and a later job of the same name begins above ``epoch``, or above MOST_EPOCH."""
        last = max(min(epoch, MOST_EPOCH), self.last_epoch(job))
        self.file.write("INSERT OR REPLACE INTO last_epochs VALUES (?, ?)", (job, last))

    def last_epoch(self, job: str) -> int:
        """Return the highest epoch of the forgotten jobs of that name; 0 if there was none."""
        query = "SELECT COALESCE(MAX(epoch), 0) FROM last_epochs WHERE job = ?"
        return int(self.file.rows(query, (job,))[0][0])

    def next_number(self) -> int:
        """Return an N for a name jobN that no present or past job has: above all of theirs.

        People may call a job jobN, too, and hosts report names. Once one of them has used up the
        last number, it is the lowest free N.
        """
        query = "SELECT name FROM jobs UNION SELECT job FROM last_epochs"
        names = (NUMBERED.fullmatch(name) for (name,) in self.file.rows(query))
        used = {int(found[1]) for found in names if found}
        last = max(used, default=0)
        if last < LAST_NUMBER:
            return last + 1
        return next(number for number in itertools.count(1) if number not in used)

    def set_job(self, name: str, state: str, code: int | None) -> None:
        self.file.write("UPDATE jobs SET state = ?, code = ? WHERE name = ?", (state, code, name))

    # ---- capsules and who owns them ----

    def capsules(self, job: str) -> list[tuple[str, str, int, str, int, int | None, int]]:
        query = "SELECT * FROM capsules WHERE job = ? ORDER BY number"
        return self.file.rows(query, (job,))

    def set_ended(self, capsule: str, code: int) -> None:
        self.file.write("UPDATE capsules SET code = ? WHERE name = ?", (code, capsule))

    def commit(self, capsule: str, host: str, epoch: int) -> None:
        """Pass a capsule to ``host`` under ``epoch``, which must be the next one.

        This is the commit of a migration. Before it returns, only the old owner may run the
        capsule; afterwards only the new owner may, once it has the grant.
        """
        done = self.file.write(
            "UPDATE capsules SET host = ?, epoch = ?, granted = 0"
            " WHERE name = ? AND epoch = ? - 1 AND code IS NULL",
            (host, epoch, capsule, epoch),
        )
        if done != 1:
            raise LiveshiftError(f"{capsule} is not owned under epoch {epoch - 1} any more")

    def hand_over(self, capsule: str, host: str, epoch: int) -> None:
        """Make ``host`` the owner under an epoch that the lost journal had granted to it."""
        self.file.write(
            "UPDATE capsules SET host = ?, epoch = ?, granted = 1 WHERE name = ?",
            (host, epoch, capsule),
        )

    def grant(self, capsule: str, host: str, epoch: int) -> None:
        """Record that the owner may run the capsule from now on."""
        done = self.file.write(
            "UPDATE capsules SET granted = 1 WHERE name = ? AND host = ? AND epoch = ?",
            (capsule, host, epoch),
        )
        if done != 1:
            raise LiveshiftError(f"{capsule} is not {host}'s under epoch {epoch}")

    # ---- taints ----

    def taints(self) -> dict[str, tuple[str, str]]:
        """Return the taints: host → (reason, by)."""
        rows = self.file.rows("SELECT * FROM taints")
        return {host: (reason, by) for host, reason, by in rows}

    def set_taint(self, host: str, reason: str, by: str) -> None:
        self.file.write("INSERT OR REPLACE INTO taints VALUES (?, ?, ?)", (host, reason, by))

    def clear_taint(self, host: str) -> None:
        self.file.write("DELETE FROM taints WHERE host = ?", (host,))
        self.set_deadline(host, None)

    def deadlines(self) -> dict[str, float]:
        """Return when each tainted host must be empty: host → seconds since 1970 (time.time())."""
        return dict(self.file.rows("SELECT * FROM deadlines"))

    def set_deadline(self, host: str, until: float | None) -> None:
        if until is None:
            self.file.write("DELETE FROM deadlines WHERE host = ?", (host,))
        else:
            self.file.write("INSERT OR REPLACE INTO deadlines VALUES (?, ?)", (host, until))

    def cordons(self) -> dict[str, str]:
        """Return the cordons: host → by."""
        return dict(self.file.rows("SELECT * FROM cordons"))

    def set_cordon(self, host: str, by: str) -> None:
        self.file.write("INSERT OR REPLACE INTO cordons VALUES (?, ?)", (host, by))

    def clear_cordon(self, host: str) -> None:
        self.file.write("DELETE FROM cordons WHERE host = ?", (host,))

    # ---- history ----

    def next_migration(self) -> int:
        every = "SELECT number FROM migrations UNION SELECT number FROM skipped"
        query = f"SELECT MAX(number) FROM ({every})"  # noqa: S608
        return int(self.file.rows(query)[0][0] or 0) + 1

    def skip_migrations(self, count: int) -> None:
        """Never use the next ``count`` migration numbers."""
        self.file.write("INSERT INTO skipped VALUES (?)", (self.next_migration() + count - 1,))

    def save_migration(self, number: int, row: MigrationRow) -> None:
        self.file.write(
            "INSERT OR REPLACE INTO migrations VALUES (?, ?, ?)",
            (number, row.state, msgspec.msgpack.encode(row)),
        )

    def end_migration(self, number: int, row: MigrationRow, end: MigrationStep, why: str) -> None:
        """Record the end of a migration which no step of its own has: an earlier orchestrator has
        left it under way, or its job is rewound."""
        self.save_migration(number, msgspec.structs.replace(row, state=end.value, error=why))

    def migrations_under_way(self) -> list[tuple[int, MigrationRow]]:
        """List the migrations that have not ended, with their numbers."""
        over = [step.value for step in ENDS]
        query = "SELECT number, row FROM migrations WHERE state NOT IN ({})"
        rows = self.file.rows(query.format(", ".join("?" * len(over))), over)
        return [(n, msgspec.msgpack.decode(row, type=MigrationRow)) for n, row in rows]

    def migrations_in(self, state: str, most: int) -> list[MigrationRow]:
        """List the last migrations in this state, at most ``most``, the newest first."""
        query = "SELECT row FROM migrations WHERE state = ? ORDER BY number DESC LIMIT ?"
        rows = self.file.rows(query, (state, most))
        return [msgspec.msgpack.decode(row, type=MigrationRow) for (row,) in rows]

    def migration(self, number: int) -> MigrationRow | None:
        found = self.file.rows("SELECT row FROM migrations WHERE number = ?", (number,))
        return msgspec.msgpack.decode(found[0][0], type=MigrationRow) if found else None

    def migration_named(self, name: str) -> MigrationRow | None:
        """Return the migration of that name ("m12"), which may be any text that a person typed."""
        number = name.removeprefix("m")
        if not number.isdecimal() or len(number) >= 18:  # SQLite's integers have 64 bits
            return None
        return self.migration(int(number))

    def add_event(
        self, subject: str, kind: str, text: str, by: str = "", migration: int | None = None
    ) -> None:
        """Add a line to the history. Raises JournalError."""
        self.file.write(
            "INSERT INTO events (time, subject, kind, text, by, migration)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (time.time(), subject, kind, shortened(text, MOST_OF_AN_EVENT), by, migration),
        )

    def note(
        self, subject: str, kind: str, text: str, by: str = "", migration: int | None = None
    ) -> None:
        """Add a line to the history, or log it if the journal cannot be written."""
        try:
            self.add_event(subject, kind, text, by, migration)
        except JournalError as error:
            log.error("%s: %s: %s (not in the history: %s)", subject, kind, text, error)

    def events(
        self,
        subject: str,
        after: int,
        host: bool = False,
        sees: Callable[[str, int], bool] = lambda _subject, _number: True,
    ) -> list[Event]:
        """Return the history of a job (with its capsules), a capsule or a host; for '' of all.

        These are the newest MOST_EVENTS events, or as many as MOST_BYTES allow. It is read from the
        newest backwards, and no further than that. ``host``: the subject is a host; its history
        includes the last moves from it and to it. ``sees``: whether the caller may see an event of
        this subject and number.
        """
        if not subject:
            return self._newest("number > ?", [after], sees)
        about = [  # each uses an index: there may be very many events
            "subject = ?",
            "subject > ? AND subject < ?",  # of its capsules; "0" comes after "/"
            "migration IN (SELECT migration FROM events WHERE subject = ?)",
        ]
        if host:  # safe to format: the numbers are ours, no user text gets into the query
            about.append(f"migration IN ({','.join(map(str, self._moves_of(subject)))})")
        numbers = (f"SELECT number FROM events WHERE number > {after:d} AND {w}" for w in about)  # noqa: S608
        values = [subject, f"{subject}/", f"{subject}0", subject]
        return self._newest(f"number IN ({' UNION '.join(numbers)})", values, sees)

    def events_of_migration(
        self, number: int, after: int, sees: Callable[[str, int], bool]
    ) -> list[Event]:
        """Return the history of one migration, as :meth:`events` does."""
        return self._newest("migration = ? AND number > ?", [number, after], sees)

    def _newest(
        self, where: str, values: Sequence[object], sees: Callable[[str, int], bool]
    ) -> list[Event]:
        query = f"SELECT * FROM events WHERE {where} ORDER BY number DESC"  # noqa: S608
        found: list[Event] = []
        moves: dict[int | None, MigrationRow | None] = {}  # many events are of one move
        sizes: dict[int | None, int] = {None: 0}
        left = MOST_BYTES
        with contextlib.closing(self.file.each(query, values)) as rows:
            for number, at, about, kind, text, by, m in itertools.islice(rows, MOST_LOOKED):
                if not sees(about, number):
                    continue
                if m is not None and m not in moves:
                    moves[m] = row = self.migration(m)
                    sizes[m] = len(msgspec.msgpack.encode(row))
                left -= len(text.encode()) + sizes[m]
                if left < 0 and found:
                    break
                found.append(Event(number, at, about, kind, text, by, moves.get(m)))
                if len(found) == MOST_EVENTS:
                    break
        return found[::-1]

    def _moves_of(self, host: str) -> list[int]:
        """List the last migrations from and to a host, swaps of its GPUs included."""
        rows = self.file.rows(
            "SELECT number, row FROM migrations ORDER BY number DESC LIMIT ?", (MOVES_OF_A_HOST,)
        )
        found = []
        for number, raw in rows:
            row = msgspec.msgpack.decode(raw, type=MigrationRow)
            if host in (row.source.partition(" ")[0], row.destination.partition(" ")[0]):
                found.append(number)
        return found
