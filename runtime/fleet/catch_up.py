# SPDX-License-Identifier: Apache-2.0
"""Updates a journal that was restored from its backup with what the hosts hold.

The backup does not show which capsules have moved, begun or ended since. So the orchestrator
decides nothing until every host of the cluster file has reported. Until then it answers every
claim with "wait", counts no capsule as lost, and moves, starts and ends nothing. Then it gives
each capsule to the host that has it under the highest epoch. Epochs only grow, so this is the last
host to which the lost journal granted the capsule. It also takes over the highest count of rewinds
that a host knows of a job, and drops all snapshots: which of them holders still have is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..journal.journal_file import JournalError
from ..messages import Register
from ..model.jobs import KILLED, Capsule, Job
from ..model.steps import MigrationStep
from .fleet import Fleet

log = logging.getLogger("liveshift.catch_up")

SKIPPED = 1000
"""This many numbers of migrations, snapshots and rewinds are skipped: hosts may hold state of some
that the restored journal does not know."""


class CatchUp:
    """Takes the hosts' reports; calls ``ended`` with each capsule whose command has ended."""

    def __init__(self, fleet: Fleet, ended: Callable[[Job, Capsule, int], None]) -> None:
        self._fleet = fleet
        self._ended = ended

    def begin(self) -> None:
        """Mark as failed every migration that was under way when the backup was made."""
        journal = self._fleet.journal
        for number, row in journal.migrations_under_way():
            text = "its end is not known: the journal was put back from a backup"
            journal.end_migration(number, row, MigrationStep.FAILED, text)

    def report(self, host: str, register: Register) -> bool:
        """Take one host's report; return True if it was the last one and all is decided now.

        Raises JournalError; then nothing is decided before the host has reported again.
        """
        fleet = self._fleet
        fleet.reports[host] = register
        if waits := fleet.unreported():
            log.warning("the journal is a backup; waiting for %s to report", ", ".join(waits))
            return False
        try:
            self._decide()
        except JournalError:
            del fleet.reports[host]
            raise
        return True

    def _decide(self) -> None:
        fleet = self._fleet
        for job in fleet.jobs.values():
            if job.state == "suspended" and self._is_later(job):
                fleet.journal.set_job(job.name, "running", job.code)
                job.state = "running"
        for job, capsule in fleet.living():
            self._assign_owner(job, capsule)
        self._take_counts()
        fleet.journal.skip_migrations(SKIPPED)
        fleet.journal.file.forget_mark()  # last, so that a crash before it repeats all this
        fleet.journal.note("", "journal", "put back from a backup; all hosts have reported")

    def _is_later(self, job: Job) -> bool:
        """Whether a host has a capsule of the job under a later epoch than the journal: a suspended
        job was resumed since."""
        reports = self._fleet.reports.values()
        capsules = job.capsules.values()
        return any(r.epochs.get(c.name, 0) > c.epoch for c in capsules for r in reports)

    def _take_counts(self) -> None:
        """A count that is too low would be used again, for copies that are not of it."""
        counts: dict[str, int] = {}
        for report in self._fleet.reports.values():
            for name, count in report.rewinds.items():
                counts[name] = max(count, counts.get(name, 0))
        tables = self._fleet.journal.snapshots
        tables.catch_up(counts, SKIPPED)
        self._fleet.journal.commands.begin_all()
        for name, job in self._fleet.jobs.items():
            job.rewinds, job.newest = tables.rewinds(name), tables.newest(name)

    def _assign_owner(self, job: Job, capsule: Capsule) -> None:
        reports = self._fleet.reports.items()
        found = [(h.epochs[capsule.name], host) for host, h in reports if capsule.name in h.epochs]
        epoch, host = max(found, default=(0, ""))
        if epoch < capsule.epoch:
            self._ended(job, capsule, KILLED)
            self._fleet.journal.note(capsule.name, "lost", "lost: no host has it any more")
            return
        if (host, epoch) != (capsule.host, capsule.epoch) or not capsule.granted:
            self._fleet.journal.hand_over(capsule.name, host, epoch)
            capsule.host, capsule.epoch, capsule.granted = host, epoch, True
            self._fleet.journal.note(capsule.name, "adopted", f"adopted: it is on {host}")
        code = self._fleet.reports[host].ended.get(capsule.name)
        if code is not None:
            self._ended(job, capsule, code)
