# SPDX-License-Identifier: Apache-2.0
"""What a migration stands on: the orchestrator, as far as a migration may know it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...errors import LiveshiftError, StepFailed
from ..config.cluster import Cluster
from ..messages import Inspected, Message, Prediction, Reserved
from ..model.jobs import Capsule, Job

if TYPE_CHECKING:
    from .migration import Move
    from .story import Story

log = logging.getLogger("liveshift.migration")

MOST_NAMED = 64
"""Connections that are named in one line."""

ROOM = 1 << 30
"""Bytes beyond twice what was seen."""


class Ground(Protocol):
    """Moves implements it."""

    cluster: Cluster

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None: ...

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        """Durably pass the ownership on; raises LiveshiftError if it may not be passed.

        ``still``: the owner is known to hold the capsule without running it.
        """

    async def quiesce(self, move: Story) -> str:
        """Bring the job's ranks to a collective boundary; returns where it lies, in words.

        Raises NoBoundary with the job going on, or frozen wherever it is (``only_tcp``).
        """

    async def reopen(self, move: Story) -> str:
        """Let the job's ranks go on, unless another move holds them; never raises.

        Returns what there is to tell of it, or "".
        """

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host."""

    def another_spare(self, move: Move) -> str:
        """A host that could take the capsule instead; raises Refused when there is none."""

    def predict(
        self, capsule: Capsule, to: str, look: Inspected, reserved: Reserved, way: str = "",
        within: float | None = None,
    ) -> Prediction:  # fmt: skip
        """What a move to a host costs, of a capsule that looks like this; ``way`` instead of
        precopy.way; ``within``: seconds until its host must be empty."""

    def tell(self, move: Story, text: str) -> None:
        """Add a line to the history."""


class Gone(LiveshiftError):
    """The only copy that could run has gone."""


class NoBoundary(LiveshiftError):
    """The job's ranks could not be brought to a collective boundary.

    ``only_tcp``: they talk over TCP only, so that a rank may be frozen wherever it is.
    """

    def __init__(self, message: str, *, only_tcp: bool, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.only_tcp = only_tcp


def what_breaks(outside: Sequence[str], kind: str = "") -> str:
    """The connections that the move ends, in words; "" without any. ``kind``: "new", perhaps."""
    count = len(outside)
    if not count:
        return ""
    named = "; ".join(outside[:MOST_NAMED])
    more = f"; and {count - MOST_NAMED} more" if count > MOST_NAMED else ""
    kind = f"{kind} " if kind else ""
    what = f"a {kind}connection" if count == 1 else f"{count} {kind}connections"
    return f"breaks {what} to outside the cluster: {named}{more}"


def limit_bytes(look: Inspected) -> int:
    """How much may come for a capsule that looked like this: it may grow until it is frozen."""
    return 2 * (expected_bytes(look) + look.carried_bytes) + ROOM


def expected_bytes(look: Inspected) -> int:
    """The image of a capsule that looked like this, with its device memory, however that goes."""
    device_memory = look.gpu.total if look.gpu else 0
    survey = look.survey
    return survey.resident + survey.shared_memory + survey.nameless + device_memory


def as_ours(error: Exception) -> LiveshiftError:
    """An error as a person may see it; any other is logged."""
    if isinstance(error, LiveshiftError):
        return error
    log.exception("a migration met an internal error", exc_info=error)
    return StepFailed("migration", f"internal error: {type(error).__name__}: {error}")
