# SPDX-License-Identifier: Apache-2.0
"""The interface through which a snapshot uses the orchestrator."""

from __future__ import annotations

from typing import Protocol

from ..config.cluster import Cluster
from ..messages import Message
from ..model.jobs import Job
from ..model.snapshots import Generation


class SnapshotContext(Protocol):
    """What a snapshot needs of the orchestrator, which implements it in moves/context.py."""

    cluster: Cluster

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        """Send a request to a host's agent and return the answer. Raises what the agent raised, or
        Unreachable."""

    def is_up(self, host: str) -> bool:
        """Whether the host's agent is heard."""

    def at_gates(self, job: Job) -> str:
        """The name of a migration that holds the job's ranks at a boundary; "" if none does."""

    async def close_gates(self, job: Job) -> str:
        """Bring the job's ranks to a boundary; returns a text that says where it lies.

        The caller has seen that no migration is at the gates, and lets none begin to close them
        until it has called :meth:`open_gates`. Raises NoBoundary; then the job goes on.
        """

    async def open_gates(self, job: Job) -> str:
        """Let the job's ranks go on; never raises. Returns a remark for the log, or ""."""

    def complete(self, generation: Generation) -> None:
        """Durably make a snapshot the newest one of its job. Raises LiveshiftError, and changes
        nothing, if the job is no longer as it was when the snapshot began."""

    def suspend(self, generation: Generation, why: str, to: str = "") -> None:
        """Do what :meth:`complete` does, and let no host run a capsule of the job from then on. The
        journal keeps ``why``."""
