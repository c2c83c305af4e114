# SPDX-License-Identifier: Apache-2.0
"""The interface through which a migration uses the orchestrator, and helpers for migrations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...errors import LiveshiftError, StepFailed
from ..config.cluster import Cluster
from ..messages import Inspected, Message, Prediction, Reserved
from ..model.jobs import Capsule, Job

if TYPE_CHECKING:
    from .host_migration import HostMigration
    from .migration import Migration
    from .order import Order

log = logging.getLogger("liveshift.migration")

MOST_NAMED = 64
"""A warning about broken connections names at most this many."""

SPARE_BYTES = 1 << 30
"""The destination accepts twice the bytes that the survey saw, and this many bytes more."""


class MigrationContext(Protocol):
    """What a migration needs of the orchestrator, which implements it in moves/context.py."""

    cluster: Cluster

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        """Send a request to a host's agent and return the answer. Raises what the agent raised, or
        Unreachable."""

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        """Durably pass the ownership to ``host``; raises LiveshiftError if that is not allowed.

        ``still``: the owner is known to hold the capsule without running it.
        """

    async def until_heard(self, job: Job, by: float) -> None:
        """Return once no host of the job is late with its heartbeats; at the latest after
        timeouts.suspicion, or at ``by`` (monotonic seconds). Raises Unreachable if one is not up.
        Does nothing for a job without a snapshot."""

    async def quiesce(self, migration: Migration) -> str:
        """Bring the job's ranks to a boundary; returns in words where it lies.

        Raises NoBoundary; then the job goes on, unless another migration has frozen a rank of it
        (``only_tcp``).
        """

    async def reopen(self, migration: Migration) -> str:
        """Let the job's ranks go on, unless another migration holds them; never raises. While that
        is not possible, ``migration.waits`` says why.

        Returns a remark for the record, or "".
        """

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host."""

    def another_spare(self, migration: HostMigration) -> str:
        """Return another host that can take the capsule; raises Refused if there is none."""

    def predict(
        self, order: Order, inspected: Inspected, reserved: Reserved, within: float | None
    ) -> Prediction:
        """Predict what the ordered move costs. ``within``: seconds until the source host must be
        empty."""

    def note(self, migration: Migration, text: str) -> None:
        """Add a line to the history."""

    def record(self, migration: Migration) -> None:
        """Record the migration's step, which has changed."""


class Gone(LiveshiftError):
    """The only copy of the capsule that could run is gone."""


class NoBoundary(LiveshiftError):
    """The job's ranks could not be brought to a boundary.

    ``only_tcp``: the ranks talk over TCP only, so a rank may be frozen wherever it is.
    """

    def __init__(self, message: str, *, only_tcp: bool, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.only_tcp = only_tcp


def what_breaks(outside: Sequence[str], kind: str = "") -> str:
    """Name the connections that the move breaks; "" if there are none. ``kind``: "new" or ""."""
    count = len(outside)
    if not count:
        return ""
    named = "; ".join(outside[:MOST_NAMED])
    more = f"; and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
    kind = f"{kind} " if kind else ""
    what = f"a {kind}connection" if count == 1 else f"{count} {kind}connections"
    return f"breaks {what} to outside the cluster: {named}{more}"


def limit_bytes(inspected: Inspected) -> int:
    """Return how many bytes the destination accepts: the capsule may grow until it is frozen."""
    return 2 * (expected_bytes(inspected) + inspected.carried_bytes) + SPARE_BYTES


def expected_bytes(inspected: Inspected) -> int:
    """Estimate the bytes of the capsule's memory: host memory, and device memory by any path."""
    device_memory = inspected.gpu.total if inspected.gpu else 0
    survey = inspected.survey
    return survey.resident + survey.shared_memory + survey.nameless + device_memory


def as_ours(error: Exception) -> LiveshiftError:
    """Return a LiveshiftError as it is; log any other error and wrap it into a StepFailed."""
    if isinstance(error, LiveshiftError):
        return error
    log.exception("a migration met an internal error", exc_info=error)
    return StepFailed("migration", f"internal error: {type(error).__name__}: {error}")
