# SPDX-License-Identifier: Apache-2.0
"""The interface through which a rewind uses the orchestrator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..journal.snapshot_tables import RewindRow
from ..model.jobs import Capsule, Job
from .images_gone import HostsAsked


class RewindContext(HostsAsked, Protocol):
    """What a rewind needs of the orchestrator, which implements it in protection/rewinds.py."""

    def why_again(self, job: Job) -> str:
        """Why the job must be rewound once more, in words: a host that has or gets a capsule of it
        is lost, or reported without one. Empty if that is not so."""

    def lacks(self, capsule: Capsule, why: str) -> None:
        """The host that was let run the capsule does not have it. ``why_again`` then says so."""

    def before(self, job: Job) -> list[str]:
        """The hosts of which one must have ended its earlier copies before a capsule of the job is
        restored (ownership.may_restore); empty if one has, or is dead by a person's word."""

    def may_have_run(self, row: RewindRow) -> bool:
        """Whether a capsule of the job may have run here since the boundary of its snapshot."""

    def begin_restoring(self, row: RewindRow) -> None:
        """Record that ``before`` is empty from now on. Raises LiveshiftError."""

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        """Durably pass the ownership to ``host``; raises LiveshiftError if that is not allowed.

        ``still``: the owner is known to hold the capsule without running it.
        """

    def another_host(self, capsule: Capsule, avoid: Collection[str]) -> str:
        """Return a host with room for the capsule that is not in ``avoid``; raises Refused if there
        is none."""

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host."""

    async def open_gates(self, job: Job) -> str:
        """Let the job's ranks communicate; returns a remark, or "". Raises LiveshiftError if some
        cannot yet."""

    def end_rewind(self, row: RewindRow) -> None:
        """Record that all capsules run again. Raises LiveshiftError."""

    def note(self, job: Job, kind: str, text: str) -> None:
        """Add a line to the job's history."""
