# SPDX-License-Identifier: Apache-2.0
"""The judge of claims: an agent sends a claim for its copy of a capsule, and gets a ruling.

ownership.rule decides. This file gives it what the orchestrator knows, and makes each grant durable
before the host hears of it.
"""

from __future__ import annotations

import logging

from ...errors import LiveshiftError
from .. import messages
from ..migration.host_migration import HostMigration
from ..migration.migration import Migration
from ..migration.migration_records import MigrationRecords
from ..model.jobs import Job
from ..model.ownership import Ruling, Side, rule, rule_held
from ..model.snapshots import HELD, snapshot_of
from ..model.steps import MigrationStep
from .fleet import Fleet

log = logging.getLogger("liveshift.claims")


class ClaimJudge:
    """The orchestrator has one instance, which rules on the claims of all agents. ``fleet`` says
    who owns a capsule; ``records`` has the last step of a migration that ``fleet`` no longer
    has."""

    def __init__(self, fleet: Fleet, records: MigrationRecords) -> None:
        self._fleet = fleet
        self._records = records

    def rule(self, host: str, claim: messages.Claim) -> messages.Ruled:
        """Return what becomes of the host's copy. Raises JournalError; then nothing is
        granted."""
        found = self._fleet.find(claim.capsule)
        if found is None:
            return self._rule_forgotten(host, claim)
        job, capsule = found
        if claim.side == HELD:
            return self._rule_held(host, job, claim)
        migration, step = self._move(claim)
        side = Side(claim.side)
        ruling = rule(
            side,
            host,
            claim.epoch,
            capsule.owner,
            step,
            copy_rewinds=claim.rewinds,
            job_rewinds=job.rewinds,
        )
        if capsule.code is not None:
            ruling = Ruling.END
        if ruling is Ruling.RUN and not claim.ready:
            ruling = Ruling.WAIT
        leaves = migration if ruling is Ruling.RUN and side is Side.LEAVING else None
        if leaves is not None:
            # Write the step first: else a restarted orchestrator might still commit this migration.
            self._records.ensure_saved(leaves)
        if ruling is Ruling.RUN and not capsule.granted:
            self._fleet.journal.grant(capsule.name, host, capsule.epoch)
            capsule.granted = True
        if isinstance(leaves, HostMigration):
            leaves.released = True
        log.log(
            logging.DEBUG if ruling is Ruling.WAIT else logging.INFO,
            "%s: %s on %s, %s under epoch %d: %s",
            claim.migration,
            claim.capsule,
            host,
            side.value,
            claim.epoch,
            ruling.value,
        )
        return messages.Ruled(ruling.value, capsule.epoch)

    def _move(self, claim: messages.Claim) -> tuple[Migration | None, MigrationStep | None]:
        """The migration that a claim names, if it still counts, and its last step. Each is None if
        it is another capsule's: a host must not decide what becomes of that one."""
        migration = self._fleet.migrations.get(claim.migration)
        if migration is None:
            return None, self._records.last_step(claim.migration, claim.capsule)
        if migration.capsule.name != claim.capsule:
            return None, None
        return migration, migration.step

    def _rule_held(self, host: str, job: Job, claim: messages.Claim) -> messages.Ruled:
        """Rule on a host's image of a snapshot. Raises LiveshiftError if it is not named as one."""
        number = snapshot_of(claim.migration)
        if number is None:
            raise LiveshiftError(f'{host} claims an image "{claim.migration}", which has no number')
        newest = job.newest.number if job.newest else 0
        ruling = rule_held(number, newest, job.taking)
        # A copy that did not come whole with the snapshot never will. And the hosts of a suspended
        # job are to be free.
        copies = claim.ready and job.state != "suspended"
        keepers = job.newest.keepers(claim.capsule, copies=copies) if job.newest else set()
        if job.state == "suspended" and not claim.ready:  # only a copy may come now
            keepers = set()
        keepers |= {job.copying_to.get(claim.migration, "")}
        if number == newest != job.taking and host not in keepers:  # or a directory has it now
            ruling = Ruling.END
        if job.state == "ended":
            ruling = Ruling.END
        if ruling is Ruling.END:
            log.info("%s: %s on %s: %s", claim.migration, claim.capsule, host, ruling.value)
        return messages.Ruled(ruling.value, claim.epoch)

    def _rule_forgotten(self, host: str, claim: messages.Claim) -> messages.Ruled:
        """Rule on a capsule that the journal does not have. A forgotten job's copy must end. A copy
        of a job that was never known waits: perhaps the journal is wrong."""
        last = self._fleet.journal.last_epoch(claim.capsule.partition("/")[0])
        if claim.epoch <= last:
            return messages.Ruled(Ruling.END.value, last)
        log.error("%s holds %s, which this journal does not know", host, claim.capsule)
        return messages.Ruled(Ruling.WAIT.value, 0)
