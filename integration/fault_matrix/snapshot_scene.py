# SPDX-License-Identifier: Apache-2.0
"""Where snapshots, rewinds and suspensions are harmed: a lab of four hosts.

Two of them run the job, two may hold its images. Rank 1 is the one that is harmed: the *owner* runs
it, the *holder* has its image.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from lab_session import eventually
from protected_job import wait_protected
from reference_runs import References
from whereabouts import GONE, every_pid, spaces, where

from liveshift.runtime.messages import JobRow

from .stage import HARMED, RANKS, Stage

REFUSALS, BETWEEN_S = 3, 0.5
"""A resumption that was refused so often, for the same reason each time, will not succeed."""


class SnapshotScene(Stage):
    """``refused``: why the job could not be resumed, one text for each attempt of the cell."""

    lab_options = ("--hosts", "4", "--snapshots", "every=1")
    run_options = ("--max-rewinds", "1000")
    cell_steps = 900

    def __init__(self, place: Path, references: References, stall_s: float) -> None:
        super().__init__(place, references, stall_s)
        self.owner = self.holder = ""
        self.refused: list[str] = []
        self._newest = ""
        self._rests = False

    def prepare(self) -> None:
        super().prepare()
        wait_protected(self.job)
        # After a host was away, hosts of the job may hold images for some snapshots.
        eventually(self._is_held_elsewhere, "other hosts to hold its images", 60)
        # A rewind in place needs no holder then.
        eventually(lambda: not self.job.protection().sent, "a copy of each image at home", 60)
        self.owner = self.job.seen(HARMED).host
        self.holder = self.job.protection().holders[-1]
        self.refused = []
        self.expect_later()

    # ---- what people do ----

    def suspend(self) -> None:
        """The job runs nowhere when this returns, and each of its images is on two hosts. The
        holder is the one that would give rank 1's to a resumption now. Nothing will be over then
        before the next :meth:`expect_later`: harm lasts as long as it may."""
        self.session.json("suspend", self.job.name)
        assert self.running() == [], "a suspended job has processes"
        eventually(self._is_copied, "each image to be on two hosts", 60)
        planned = self.session.json("resume", self.job.name, "--dry-run")
        self.holder = planned["where"][self.capsule]
        assert self.holder in self.job.protection().holders
        self._rests = True

    def kill_rank(self) -> None:
        found = [pid for pid in every_pid() if self._is_rank(pid)]
        assert found, f"no process of {self.capsule} is on {self.owner}"
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_rank(self, pid: int) -> bool:
        """Whether this is a process of the harmed rank: none but a job's trains."""
        init = self.lab.machine(self.owner).init
        assert init is not None
        with suppress(*GONE):
            here = os.stat(f"/proc/{init.pid}/ns/pid").st_ino in spaces(pid)
            return here and b"tiny.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def running(self) -> list[str]:
        """The hosts that have a process of the job."""
        capsules = (f"{self.job.name}/{rank}" for rank in range(RANKS))
        return sorted({host for capsule in capsules for host in where(self.lab, capsule)})

    # ---- how the job is ----

    def state(self) -> str:
        row = self._row()
        return row.state if row else "unknown"

    def expect_later(self) -> None:
        """The job is protected again only once it has a snapshot of after now."""
        self._rests = False
        row = self._row()
        self._newest = row.protection.newest if row and row.protection else ""

    def is_over(self) -> bool:
        """Whether the job is at rest although the harm may last: it has ended or is suspended, or
        it trains and has a later snapshot that protects it."""
        if self._rests:
            return False
        row = self._row()
        if row is None or row.protection is None or row.state != "running":
            return row is not None and row.state in ("ended", "suspended")
        return row.protection.newest != self._newest and not row.protection.why_not

    def at_rest(self) -> bool:
        """Whether the job has ended, trains and is protected, or cannot be resumed. A suspended one
        is resumed. For when all harm is healed."""
        if self.state() == "suspended":
            said = self.session.cli("resume", self.job.name, code=None)
            if said.code != 0:
                self.refused.append(" ".join(said.err.split()))
                time.sleep(BETWEEN_S)
            return self.is_lost
        return self.is_over()

    @property
    def is_lost(self) -> bool:
        """Whether the suspended job cannot be resumed."""
        last = self.refused[-REFUSALS:]
        return len(last) == REFUSALS and len(set(last)) == 1

    def _is_held_elsewhere(self) -> bool:
        row = self.job.protection()
        own = {self.job.seen(rank).host for rank in range(RANKS)}
        return bool(row.holders) and not row.why_not and own.isdisjoint(row.holders)

    def _is_copied(self) -> bool:
        found = self.job.protection()
        return bool(found.holders) and not found.alone

    def _row(self) -> JobRow | None:
        """None while the orchestrator does not answer."""
        status = self.status()
        rows = status.jobs if status is not None else []
        return next((row for row in rows if row.name == self.job.name), None)


def owner(scene: SnapshotScene) -> str:
    return scene.owner


def holder(scene: SnapshotScene) -> str:
    return scene.holder
