# SPDX-License-Identifier: Apache-2.0
"""The part of the journal about snapshots and rewinds: which snapshot of a job is complete, how
often the job was rewound, and which rewind is under way.

Two writes decide: :meth:`SnapshotTables.complete_snapshot` makes a snapshot the one to which the
job goes back, and :meth:`SnapshotTables.rewind` takes all its capsules back at once. Each is one
transaction, and checks in it that nothing has changed since it was prepared.

A suspension is both in one transaction, and is written as a rewind: every copy of the job counts as
an earlier one from then on, and must end. It restores nothing. The rewind that follows it, the
resumption, does that.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from ...errors import LiveshiftError
from ..model.jobs import LastRewind
from ..model.ownership import REWIND_EPOCHS, Owner, last_whole
from ..model.snapshots import Generation
from .journal_file import JournalFile

SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshots (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, state TEXT, row BLOB);
CREATE TABLE IF NOT EXISTS rewinds (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT, state TEXT, row BLOB);
CREATE TABLE IF NOT EXISTS rewound (job TEXT PRIMARY KEY, count INTEGER);
CREATE TABLE IF NOT EXISTS saved (job TEXT PRIMARY KEY, name TEXT, directory TEXT, time REAL);
"""
"""AUTOINCREMENT: SQLite never gives a number twice, even if its row is gone
(https://www.sqlite.org/autoinc.html). ``snapshots.state``: taking or complete. ``rewinds.state``:
ending (earlier copies end, nothing is restored yet), restoring, done, or replaced by a later one.
"""


class RewindKind(enum.Enum):
    """Each RewindRow is of one of these kinds. A REWIND takes all capsules of a job back to a
    snapshot. A SUSPENSION ends all copies of the job and restores nothing. A RESUMPTION restores a
    suspended job from its snapshot."""

    REWIND = "rewind"
    SUSPENSION = "suspension"
    RESUMPTION = "resumption"

    @property
    def under_way(self) -> str:
        """The kind of the events that tell of it before it has ended."""
        return {"rewind": "rewinding", "suspension": "suspending"}.get(self.value, "resuming")


@dataclass(frozen=True)
class RewindRow:
    """A rewind of a job, as it was written; ``kind``: whether it is one, or a suspension or the
    resumption after one.

    ``number`` counts the rewinds of all jobs, ``rewinds`` those of this one. ``generation``: the
    number of the snapshot. ``owners``: the new host and epoch of each capsule. ``before``: the
    hosts of which one must have ended its earlier copies first (ownership.may_restore). ``time``:
    seconds since 1970 (time.time()). ``died``: the capsules whose commands have ended and so caused
    it, each with how many collectives it had finished, 0 if not known.
    ``to``: the directory in which the images of a suspension are saved then, or "".
    ``left``: the host of each capsule that might run there until this write. ``lost``: the hosts
    that were lost, also those of rewinds that this one replaces. ``boundary``: the time of the
    snapshot, in seconds since 1970; 0 in rows of an earlier version. ``ended``: when all capsules
    ran again, in seconds since 1970; 0 until then, and in rows of an earlier version.
    """

    number: int
    job: str
    generation: int
    rewinds: int
    owners: dict[str, tuple[str, int]]
    before: list[str]
    why: str
    time: float
    died: dict[str, int] = field(default_factory=dict)
    kind: RewindKind = RewindKind.REWIND
    to: str = ""
    left: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    boundary: float = 0.0
    ended: float = 0.0

    @property
    def led_to(self) -> LastRewind:
        repeated_s = max(0.0, self.time - self.boundary)
        return LastRewind(self.boundary, repeated_s, self.ended or self.time)


class SavedRow(NamedTuple):
    """The last snapshot of a job that was saved: its name in ``directory``, and the time of its
    boundary, in seconds since 1970 (time.time())."""

    name: str
    directory: str
    time: float


class SnapshotTables:
    """These tables; ``file`` also has those of :class:`.journal.Journal`, jobs and capsules."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._began = time.monotonic()
        self._written: dict[int, float] = {}  # by rewind: when this process began it, monotonic

    # ---- snapshots ----

    def begin_snapshot(self, job: str, above: int = 0) -> int:
        """Record that a snapshot is begun, and return its number: no earlier one had it, and it is
        higher than ``above``."""
        with self._file.together():
            number = max(self._last_number("snapshots"), above) + 1
            self._file.write("INSERT INTO snapshots VALUES (?, ?, 'taking', x'')", (number, job))
        return number

    def complete_snapshot(self, generation: Generation) -> None:
        """Make a snapshot the newest one of its job; earlier ones are dropped.

        Raises LiveshiftError, and changes nothing, if the snapshot was given up, if the job does
        not run any more or was rewound, or if a capsule has ended or belongs to another host or
        epoch than when it was frozen.
        """
        number, job = generation.number, generation.job
        with self._file.together():
            found = self._file.rows("SELECT state FROM jobs WHERE name = ?", (job,))
            if found != [("running",)] or self.rewinds(job) != generation.rewinds:
                raise LiveshiftError(f"{job} was rewound or has ended since s{number} was begun")
            if self._owners(job) != generation.owners:
                raise LiveshiftError(f"a capsule of {job} has moved or ended since s{number}")
            done = self._file.write(
                "UPDATE snapshots SET state = 'complete', row = ?"
                " WHERE number = ? AND job = ? AND state = 'taking'",
                (msgspec.msgpack.encode(generation), number, job),
            )
            if done != 1:
                raise LiveshiftError(f"s{number} of {job} is not being taken any more")
            self._file.write("DELETE FROM snapshots WHERE job = ? AND number < ?", (job, number))

    def rewrite(self, generation: Generation) -> None:
        """Record that the images of a suspended job's snapshot are elsewhere. Raises
        LiveshiftError, and changes nothing, if the job is not suspended, or not at that snapshot.
        """
        with self._file.together():
            newest = self.newest(generation.job)
            found = self._file.rows("SELECT state FROM jobs WHERE name = ?", (generation.job,))
            if newest is None or newest.number != generation.number or found != [("suspended",)]:
                raise LiveshiftError(f"{generation.job} is not suspended at {generation.name}")
            self._file.write(
                "UPDATE snapshots SET row = ? WHERE number = ?",
                (msgspec.msgpack.encode(generation), generation.number),
            )

    def note_saved(self, job: str, name: str, directory: str, when: float) -> None:
        """Record where the last saved snapshot of a job is, for those who may need it."""
        self._file.write(
            "INSERT OR REPLACE INTO saved VALUES (?, ?, ?, ?)", (job, name, directory, when)
        )

    def saved(self, job: str) -> SavedRow | None:
        """Return where the last saved snapshot of a job is."""
        rows = self._file.rows("SELECT name, directory, time FROM saved WHERE job = ?", (job,))
        return SavedRow(*rows[0]) if rows else None

    def give_up_snapshot(self, number: int) -> None:
        """Record that a snapshot was not completed. Repeatable."""
        self._file.write("DELETE FROM snapshots WHERE number = ? AND state = 'taking'", (number,))

    def drop_snapshots(self, job: str) -> None:
        """Record that a job does not go back to any of its complete snapshots. Repeatable."""
        self._file.write("DELETE FROM snapshots WHERE job = ? AND state = 'complete'", (job,))

    def snapshots_under_way(self) -> list[tuple[int, str]]:
        """List the snapshots that are neither complete nor given up: number and job."""
        return self._file.rows("SELECT number, job FROM snapshots WHERE state = 'taking'")

    def newest(self, job: str) -> Generation | None:
        """Return the newest complete snapshot of a job."""
        query = (
            "SELECT row FROM snapshots WHERE job = ? AND state = 'complete'"
            " ORDER BY number DESC LIMIT 1"
        )
        found = self._file.rows(query, (job,))
        return msgspec.msgpack.decode(found[0][0], type=Generation) if found else None

    # ---- rewinds ----

    def rewinds(self, job: str) -> int:
        """Return how often the job was rewound. A later job of the same name goes on from there: a
        host that missed the end of the earlier one must not take its count for a newer one."""
        query = "SELECT COALESCE(MAX(count), 0) FROM rewound WHERE job = ?"
        return int(self._file.rows(query, (job,))[0][0])

    def history(self, job: str) -> list[RewindRow]:
        """Return all rewinds of a job, oldest first."""
        rows = self._file.rows("SELECT row FROM rewinds WHERE job = ? ORDER BY number", (job,))
        return [msgspec.msgpack.decode(row, type=RewindRow) for (row,) in rows]

    def may_have_run(self, row: RewindRow) -> bool:
        """Whether a capsule of the job may have run since the boundary of the snapshot to which
        ``row`` leads. The first resumption after a suspension finds all as that has left it."""
        earlier = [
            each
            for each in self.history(row.job)
            if each.number < row.number and each.generation == row.generation
        ]
        kinds = {each.kind for each in earlier}
        return row.kind is not RewindKind.RESUMPTION or kinds != {RewindKind.SUSPENSION}

    def last_rewind(self, job: str) -> LastRewind | None:
        """Return where the last rewind of a job led that has ended, resumptions left out."""
        query = "SELECT row FROM rewinds WHERE job = ? AND state = 'done' ORDER BY number DESC"
        for (found,) in self._file.rows(query, (job,)):
            row = msgspec.msgpack.decode(found, type=RewindRow)
            if row.kind is RewindKind.REWIND and row.boundary:
                return row.led_to
        return None

    def age(self, row: RewindRow) -> float:
        """Return how many seconds ago a rewind was written. The clock may have been set since, in
        either direction. That does not matter to a rewind of ours. One of an earlier orchestrator
        may then seem older than it is, but never younger than this orchestrator."""
        now = time.monotonic()
        if (written := self._written.get(row.number)) is not None:
            return now - written
        return max(time.time() - row.time, now - self._began)

    def cut_off(self, job: str, after: int, until: int) -> RewindRow | None:
        """Return the first rewind of a job that has a count above ``after``, and up to ``until``:
        it has ended what ran under the count ``after``, or since the job's start."""
        return next((row for row in self.history(job) if after < row.rewinds <= until), None)

    def rewind(
        self,
        job: str,
        generation: int,
        plan: Mapping[str, str],
        why: str,
        died: Mapping[str, int] | None = None,
        kind: RewindKind = RewindKind.REWIND,
        lost: Collection[str] = (),
    ) -> RewindRow:
        """Take all capsules of a job back to snapshot ``generation``; ``plan``: capsule → host;
        ``died``, ``lost``: see RewindRow.

        Before it returns, only the present owners may run the capsules; afterwards only those of
        the plan may, each once it has the grant. Raises LiveshiftError, and changes nothing, if
        that is not the job's newest complete snapshot, if the plan does not name exactly the job's
        capsules, or if one of them or the job has ended.
        """
        with self._file.together():
            row = self._new_row(kind, job, generation, plan, why, died or {})
            row = replace(row, lost=sorted(lost))
            self._write_rewind(row, "rewinding", ("running", "rewinding"))
        return row

    def suspend(self, generation: Generation, why: str, to: str = "") -> RewindRow:
        """Make a snapshot the newest one of its job, and suspend the job there: from now on no host
        may run any of its capsules. ``to``: see RewindRow. Raises as :meth:`complete_snapshot`
        does, and changes nothing then."""
        job, where = generation.job, {c: host for c, (host, _) in generation.owners.items()}
        with self._file.together():
            self.complete_snapshot(generation)
            row = self._new_row(RewindKind.SUSPENSION, job, generation.number, where, why, {})
            row = replace(row, to=to)
            self._write_rewind(row, "suspended", ("running",))
        return row

    def save_to(self, job: str, to: str) -> RewindRow:
        """Record that the images of a suspended job are to be saved in the directory ``to``, and
        return the suspension. Raises LiveshiftError if the job is not suspended."""
        with self._file.together():
            rows = [row for row, _ in self.rewinds_under_way() if row.job == job]
            if not rows or rows[0].kind is not RewindKind.SUSPENSION:
                raise LiveshiftError(f"{job} is not suspended")
            row = replace(rows[0], to=to)
            self._file.write(
                "UPDATE rewinds SET row = ? WHERE number = ?",
                (msgspec.msgpack.encode(row), row.number),
            )
        return row

    def resume(self, job: str, generation: int, plan: Mapping[str, str], why: str) -> RewindRow:
        """Give the capsules of a suspended job to the hosts of the plan, as :meth:`rewind` does."""
        with self._file.together():
            row = self._new_row(RewindKind.RESUMPTION, job, generation, plan, why, {})
            self._write_rewind(row, "rewinding", ("suspended",))
        return row

    def suspend_again(self, resumption: RewindRow, why: str) -> RewindRow:
        """Suspend a job whose resumption has failed, at the same snapshot; what was restored must
        end. Raises LiveshiftError, and changes nothing, if the resumption is over."""
        job, plan = resumption.job, {c: host for c, (host, _) in resumption.owners.items()}
        with self._file.together():
            if self.rewinds(job) != resumption.rewinds:
                raise LiveshiftError(f"{job} was rewound since")
            number = resumption.generation
            row = self._new_row(RewindKind.SUSPENSION, job, number, plan, why, {})
            self._write_rewind(row, "suspended", ("rewinding",))
        return row

    def _new_row(
        self,
        kind: RewindKind,
        job: str,
        generation: int,
        plan: Mapping[str, str],
        why: str,
        died: Mapping[str, int],
    ) -> RewindRow:
        newest = self.newest(job)
        if newest is None or newest.number != generation:
            raise LiveshiftError(f"s{generation} is not the newest snapshot of {job} any more")
        owners = self._owners(job)
        if owners.keys() != plan.keys():
            raise LiveshiftError(f"no {kind.value} of {job} is possible: a capsule has ended")
        new = {c: (plan[c], epoch + REWIND_EPOCHS) for c, (_, epoch) in owners.items()}
        before = sorted(last_whole(self._granted(job), self.before(job)))
        number, count = self._last_number("rewinds") + 1, self.rewinds(job) + 1
        return RewindRow(
            number=number,
            job=job,
            generation=generation,
            rewinds=count,
            owners=new,
            before=before,
            why=why,
            time=time.time(),
            died=dict(died),
            boundary=newest.time,
            kind=kind,
            left=self._may_run(job),
        )

    def _write_rewind(self, row: RewindRow, state: str, states: tuple[str, ...]) -> None:
        """Write a row. The job gets ``state``; it must be in one of ``states``."""
        found = self._file.rows("SELECT state FROM jobs WHERE name = ?", (row.job,))
        if not found or found[0][0] not in states:
            there = found[0][0] if found else "gone"
            raise LiveshiftError(f"no {row.kind.value} of {row.job} is possible: it is {there}")
        self._file.write("UPDATE jobs SET state = ? WHERE name = ?", (state, row.job))
        self._file.write("INSERT OR REPLACE INTO rewound VALUES (?, ?)", (row.job, row.rewinds))
        self._file.write_all(
            "UPDATE capsules SET host = ?, epoch = ?, granted = 0 WHERE name = ?",
            [(host, epoch, name) for name, (host, epoch) in row.owners.items()],
        )
        self._file.write(
            "UPDATE rewinds SET state = 'replaced' WHERE job = ? AND state != 'done'", (row.job,)
        )
        self._file.write(
            "INSERT INTO rewinds VALUES (?, ?, 'ending', ?)",
            (row.number, row.job, msgspec.msgpack.encode(row)),
        )
        self._written[row.number] = time.monotonic()

    def before(self, job: str) -> list[str]:
        """Return the hosts of which one must end its earlier copies before the job may be restored;
        empty if one has, or if no rewind is under way."""
        query = "SELECT row FROM rewinds WHERE job = ? AND state = 'ending'"
        found = self._file.rows(query, (job,))
        return msgspec.msgpack.decode(found[0][0], type=RewindRow).before if found else []

    def begin_restoring(self, number: int) -> None:
        """Record that one earlier copy has certainly ended. Only after this may a capsule of the
        rewind be restored, by this orchestrator or a later one. Repeatable."""
        self._file.write(
            "UPDATE rewinds SET state = 'restoring' WHERE number = ? AND state = 'ending'",
            (number,),
        )

    def end_rewind(self, row: RewindRow) -> bool:
        """Record that all capsules run again. The job runs, unless it is being ended meanwhile.
        Changes nothing if a later rewind has replaced this one, and returns False then. Repeatable.
        """
        with self._file.together():
            done = self._file.write(
                "UPDATE rewinds SET state = 'done', row = ?"
                " WHERE number = ? AND state = 'restoring'",
                (msgspec.msgpack.encode(replace(row, ended=time.time())), row.number),
            )
            if done:
                self._file.write(
                    "UPDATE jobs SET state = 'running' WHERE name = ? AND state = 'rewinding'",
                    (row.job,),
                )
        return done == 1

    def rewinds_under_way(self) -> list[tuple[RewindRow, bool]]:
        """List the rewinds that have not ended, each with whether it may restore capsules. A
        suspension does not end before another row takes its place."""
        query = "SELECT row, state FROM rewinds WHERE state IN ('ending', 'restoring')"
        return [
            (msgspec.msgpack.decode(row, type=RewindRow), state == "restoring")
            for row, state in self._file.rows(query)
        ]

    # ---- the job, and a journal that was put back ----

    def remove_job(self, job: str) -> None:
        """Forget a job's snapshots and rewinds, but not how often it was rewound."""
        with self._file.together():
            self._file.write("DELETE FROM snapshots WHERE job = ?", (job,))
            self._file.write("DELETE FROM rewinds WHERE job = ?", (job,))
            self._file.write("DELETE FROM saved WHERE job = ?", (job,))

    def catch_up(self, counts: Mapping[str, int], skipped: int) -> None:
        """Correct a journal that was put back from a backup, once all hosts have reported.

        ``counts``: the highest count of rewinds that a host knows, by job. The journal's may be
        lower, and then the next rewind would use a count twice. All snapshots are dropped: holders
        may have dropped those that the backup names. The next ``skipped`` numbers are not used, as
        hosts may hold images under them.
        """
        with self._file.together():
            for job, count in counts.items():
                if count > self.rewinds(job):
                    self._file.write("INSERT OR REPLACE INTO rewound VALUES (?, ?)", (job, count))
            self._file.write("DELETE FROM snapshots")
            for table in ("snapshots", "rewinds"):
                last = self._last_number(table) + skipped
                self._file.write(f"INSERT INTO {table} (number) VALUES (?)", (last,))  # noqa: S608
                self._file.write(f"DELETE FROM {table} WHERE number = ?", (last,))  # noqa: S608

    # ---- what both need ----

    def _owners(self, job: str) -> dict[str, tuple[str, int]]:
        """The host and epoch of each capsule that has not ended."""
        query = "SELECT name, host, epoch FROM capsules WHERE job = ? AND code IS NULL"
        return {name: (host, epoch) for name, host, epoch in self._file.rows(query, (job,))}

    def _granted(self, job: str) -> list[Owner]:
        rows = self._file.rows("SELECT host, epoch, granted FROM capsules WHERE job = ?", (job,))
        return [Owner(host, epoch, bool(granted)) for host, epoch, granted in rows]

    def _may_run(self, job: str) -> dict[str, str]:
        """The host of each capsule that was let run."""
        query = "SELECT name, host FROM capsules WHERE job = ? AND granted = 1"
        return dict(self._file.rows(query, (job,)))

    def _last_number(self, table: str) -> int:
        """The highest number that a row of the table has ever had; 0 if there was none."""
        query = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = ?"
        return int(self._file.rows(query, (table,))[0][0])
