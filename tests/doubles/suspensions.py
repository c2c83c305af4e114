# SPDX-License-Identifier: Apache-2.0
"""How the double of the orchestrator saves, suspends and resumes a job: at once, or as a test
says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from doubles.cluster_state import Job

from liveshift.errors import Refused
from liveshift.runtime import messages

Tell = Callable[[str, str, str, str], None]
"""Adds an event: its subject, kind, text, and who wanted it."""

NOWHERE = "runs nowhere any more: s7, 500 MB, is in the memory of h2"
SAVED = "s7 is in /nfs: 300 MB on the disk, step 9; the job was paused for 0.12 s"
AGAIN = "runs again from s7: gpt/0 on h2, gpt/1 on h2; it was suspended for 61.5 s"


@dataclass
class Suspensions:
    """``saves``, ``suspends``, ``resumes``: the kinds and texts of the events that follow an
    order. ``waits_for``: the moves that go first. ``withdraws``: whether orders can be taken
    back."""

    saves: list[tuple[str, str]] = field(default_factory=lambda: [("saved", SAVED)])
    suspends: list[tuple[str, str]] = field(default_factory=lambda: [("suspended", NOWHERE)])
    resumes: list[tuple[str, str]] = field(default_factory=lambda: [("resumed", AGAIN)])
    waits_for: list[str] = field(default_factory=list)
    withdraws: bool = False

    def snapshot(self, job: Job, ask: messages.SnapshotJob, tell: Tell) -> messages.SnapshotOrdered:
        if not ask.dry_run:
            tell(job.name, "saving", f"a snapshot is taken, and saved in {ask.to}", "root")
            for kind, text in self.saves:
                tell(job.name, kind, text, "")
        return messages.SnapshotOrdered(job.name, self._holders(job), self.waits_for)

    def suspend(self, job: Job, ask: messages.SuspendJob, tell: Tell) -> messages.SuspensionOrdered:
        if not ask.dry_run:
            tell(job.name, "suspending", "a last snapshot is taken", "root")
            for kind, text in self.suspends:
                tell(job.name, kind, text, "")
                job.suspended = job.suspended or kind == "suspended"
        return messages.SuspensionOrdered(job.name, self._holders(job), self.waits_for)

    def withdraw(self) -> messages.Withdrawn:
        return messages.Withdrawn(self.withdraws)

    def _holders(self, job: Job) -> dict[str, str]:
        return {} if self.waits_for else dict.fromkeys(job.capsules, "h2")

    def resume(self, job: Job, ask: messages.ResumeJob, tell: Tell) -> messages.ResumptionOrdered:
        if not ask.dry_run:
            tell(job.name, "resuming", "goes on from s7: gpt/0 on h2, gpt/1 on h2", "root")
            for kind, text in self.resumes:
                tell(job.name, kind, text, "")
                job.suspended = job.suspended and kind != "resumed"
        where = dict.fromkeys(job.capsules, "h2")
        return messages.ResumptionOrdered(job.name, "s7", "step 9", 61.5, where)


def check_readable(job: Job) -> None:
    """Refuse to read the output of a suspended job, as the orchestrator does."""
    if job.suspended:
        raise Refused(
            f"{job.name} is suspended: its output is part of its image",
            hint=f"`liveshift resume {job.name}`",
        )
