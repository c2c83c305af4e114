# SPDX-License-Identifier: Apache-2.0
"""What the journal has of migrations: a row for each, and lines in the history of its capsule."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ... import units
from ...errors import LiveshiftError, StepFailed
from ..journal.journal import Journal
from ..journal.journal_file import JournalError
from ..model.steps import ENDS, MigrationStep
from .host_migration import HostMigration
from .migration import Migration

log = logging.getLogger("liveshift.migrations")

SAVED_SOON = frozenset(
    {
        MigrationStep.FREEZING,
        MigrationStep.COMMITTED,
        MigrationStep.RESTORING,
        MigrationStep.RESUMING,
    }
)
SOON_S = 0.004
"""The job is frozen in the SAVED_SOON steps of a migration, so the migration does not wait for the
disk: the journal gets the step SOON_S seconds later. A restarted orchestrator sees a commit in the
journal (MigrationService.recover), and the destination answers a repeated request as before. If the
journal says "quiescing", the restarted orchestrator takes it for "freezing"
(HostMigration.recover)."""

SAVE_AGAIN_S = 1.0


class MigrationRecords:
    """The orchestrator has one instance, which writes the records of all migrations into
    ``journal``. While the journal cannot be written, ``record`` and ``record_cost`` raise nothing:
    the instance tries again every SAVE_AGAIN_S seconds."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by number: when the row is saved
        self._not_saved: set[int] = set()  # migrations whose last step the journal lacks

    def begin(self, migration: Migration, why: str) -> None:
        """Record a migration that begins, and why it leads where it does. Raises JournalError;
        then nothing is recorded."""
        source, destination = migration.way
        text = f"{migration.name} begins: {source} → {destination} ({why}): {migration.reason}"
        with self._journal.together():
            self._journal.save_migration(migration.number, migration.row())
            self._journal.add_event(
                migration.capsule.name, "move", text, migration.by, migration.number
            )

    def record(self, migration: Migration) -> None:
        """Record the step that the migration has come to. At its end the capsule is free again."""
        if isinstance(migration, HostMigration) and migration.step in SAVED_SOON:
            if migration.number not in self._timers:
                self._save_in(SOON_S, migration)
            return
        self._save_until_done(migration)
        if migration.step in ENDS:
            migration.capsule.migration = None
            _remember_failure(migration)
            self._note_end(migration)

    def record_cost(self, migration: HostMigration, text: str) -> None:
        """Record the cost of a migration, some seconds after its end. ``text``: a line for the
        history; "" for none."""
        self._save_until_done(migration)
        if text:
            self._note(migration, "cost", text)

    def note(self, migration: Migration, text: str) -> None:
        """Add a line to the history, and to the log."""
        log.warning("%s: %s", migration.name, text)
        self._note(migration, "moving", text)

    def note_boundary(self, migration: Migration, text: str) -> None:
        """Add a line to the history, a little later: the job is paused, so it does not wait for the
        disk."""
        loop = asyncio.get_running_loop()
        loop.call_later(SOON_S, self._note, migration, "boundary", text)

    def ensure_saved(self, migration: Migration) -> None:
        """Write the migration's step, if the journal lacks it. Raises JournalError."""
        if migration.number in self._not_saved:
            self._save(migration)

    def last_step(self, name: str, capsule: str) -> MigrationStep | None:
        """Return the step that the journal has of a migration; None if it has no such migration of
        this capsule."""
        row = self._journal.migration_named(name)
        return MigrationStep(row.state) if row and row.capsule == capsule else None

    # ---- saving and noting ---------------------------------------------------------------------

    def _save(self, migration: Migration) -> None:
        if (timer := self._timers.pop(migration.number, None)) is not None:
            timer.cancel()
        self._not_saved.add(migration.number)
        self._journal.save_migration(migration.number, migration.row())
        self._not_saved.discard(migration.number)

    def _save_until_done(self, migration: Migration) -> None:
        """Save the row; while the journal cannot be written, try again every SAVE_AGAIN_S."""
        try:
            self._save(migration)
        except JournalError as error:
            log.error("%s is %s: %s", migration.name, migration.step.value, error)
            self._save_in(SAVE_AGAIN_S, migration)

    def _save_in(self, seconds: float, migration: Migration) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._save_until_done, migration)
        self._timers[migration.number] = timer

    def _note(self, migration: Migration, kind: str, text: str) -> None:
        name, by = migration.capsule.name, migration.by
        self._journal.note(name, kind, text, by, migration.number)

    def _note_end(self, migration: Migration) -> None:
        row = migration.row()
        way = f"{row.source} → {row.destination}"
        if migration.step is MigrationStep.DONE:
            kind, text = "moved", f"moved {way}: paused {units.pause(row.frozen_s)}"
            if row.predicted is not None:
                text += f" (predicted {units.pause(row.predicted.seconds)})"
            if isinstance(migration, HostMigration):
                ahead = f"{units.size(row.precopy.bytes)} running, " if row.precopy else ""
                text += f"; copied {ahead}{units.size(row.image_bytes)} paused"
        elif migration.step is MigrationStep.JOB_ENDED:
            kind, text = "not moved", f"{row.error}"
        elif migration.step is MigrationStep.REWOUND:  # where it is now, its rewind says
            kind, text = "not moved", f"its move {way} is over: {row.error}"
        else:
            kind, text = "not moved", f"did not move {way}, {migration.step.value}: {row.error}"
        self._note(migration, kind, text)


def write_rewound(journal: Journal, moves: Iterable[Migration], why: LiveshiftError) -> None:
    """Record that a rewind overtakes these migrations, within the write of the rewind: so a
    restarted orchestrator goes on with none of them, and passes on no capsule of the rewind."""
    for each in moves:
        journal.end_migration(each.number, each.row(), MigrationStep.REWOUND, str(why))


def _remember_failure(migration: Migration) -> None:
    """Remember a failed dump or restore: plans show it as a warning until the capsule has moved."""
    capsule, error = migration.capsule, migration.error
    if migration.step is MigrationStep.DONE:
        capsule.failed = ""
    elif isinstance(error, StepFailed) and error.step in ("dump", "restore"):
        capsule.failed = f"its last move from here, {migration.name}, failed: {error}"
