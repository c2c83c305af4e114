# SPDX-License-Identifier: Apache-2.0
"""Where a cell plays: a lab of three hosts and a training job of two, made anew where needed.

Rank 0 stays on h0; rank 1, the capsule of all cells, goes to and fro between h1 and h2.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab_place import lab_name
from lab_session import BRISK, LONG, LabSession
from moving_job import Job
from reference_runs import References

from liveshift.errors import LiveshiftError
from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.launcher.lab import Lab
from liveshift.runtime.messages import (
    GetMigration,
    GetStatus,
    Migrate,
    MigrationDetails,
    MigrationRow,
    Named,
    Status,
)

from .held import Held

RANKS = 2
MOVING = 1
"""The rank that is moved."""

HOSTS = ("h1", "h2")
"""Between which it is moved."""

SUSPICION_S = 1.5
HEARTBEAT_S = 0.3
TIMEOUTS = f"collective=120,heartbeat={HEARTBEAT_S},suspicion={SUSPICION_S},grace=1"
"""So that a cell with a dead host takes seconds."""

LONGEST_S = 4 * SUSPICION_S
"""That harm lasts while the migration is not over: some migrations wait until it is healed."""

ENOUGH_STEPS = 600
"""A cell takes fewer steps than this. A job with fewer left is replaced before a cell."""

SHORT_FORM_STEPS = 2000
"""The job of the short form makes fewer steps in all its cells."""

LAST_STEP = int(LONG[LONG.index("--steps") + 1])

Step = dict[str, Any]


class Scene:
    """The lab and the job as cells find them: whole, and nothing under way."""

    def __init__(self, place: Path, references: References, stall_s: float) -> None:
        self.stall_s = stall_s
        self.held = Held(place / "faultpoints")
        self._place = place
        self._references = references
        self._reference: list[list[Step]] = []
        self._session: LabSession | None = None
        self._job: Job | None = None
        self._jobs = 0
        self.migration = ""
        self.source = self.destination = ""

    # ---- a lab and a job ----

    @property
    def session(self) -> LabSession:
        assert self._session is not None, "there is no lab: prepare() makes it"
        return self._session

    @property
    def lab(self) -> Lab:
        return self.session.lab

    @property
    def job(self) -> Job:
        assert self._job is not None, "there is no job: prepare() starts it"
        return self._job

    @property
    def capsule(self) -> str:
        return f"{self.job.name}/{MOVING}"

    def prepare(self) -> None:
        """Have a lab, and a job that trains with steps enough to go; rank 1 is at ``source``."""
        if not self._reference:  # before there is a job whose steps it would take time from
            self._read_reference(SHORT_FORM_STEPS)
        if self._session is None:
            self._session = LabSession(lab_name("m"), self._place)
            self._session.up("--hosts", "3", "--timeouts", TIMEOUTS, *BRISK)
            for host in HOSTS:
                self._state_in_memory(host)
        if self._job is not None and len(self.job.steps()) > LAST_STEP - ENOUGH_STEPS:
            self.end_job()
        if self._job is None:
            self._jobs += 1
            self._job = self.session.start(f"long{self._jobs}", LONG, nnodes=RANKS)
            self._job.wait_step(5)
            home = self._job.seen(MOVING).host
            assert home in HOSTS, f"rank {MOVING} has started on {home}"
        self._read_reference(len(self.job.steps()) + ENOUGH_STEPS)
        self.held.clear()
        self.source = self.job.seen(MOVING).host
        self.destination = next(host for host in HOSTS if host != self.source)

    def reference(self, rank: int) -> Sequence[Step]:
        """The steps of a run that nobody disturbed."""
        return self._reference[rank]

    def end_job(self, by_itself: bool = False) -> None:
        """See the job off: stopped, or (``by_itself``) ended by what was done to it."""
        if not by_itself:
            self.job.stop()
        self._job = None

    def strike(self) -> None:
        """Take the lab away with all in it; prepare() makes another."""
        self.held.clear()
        session, self._session, self._job = self._session, None, None
        if session is not None:
            session.down()

    def _read_reference(self, steps: int) -> None:
        """Have so many steps of it before a cell begins; a longer run goes twice as far at once."""
        if self._reference and len(self.reference(0)) >= min(steps, LAST_STEP):
            return
        further = min(2 * steps if self._reference else steps, LAST_STEP) - 1
        directory = self._references.further_than(further, LONG, RANKS)
        texts = ((directory / f"rank{rank}.jsonl").read_text() for rank in range(RANKS))
        self._reference = [[json.loads(line) for line in text.splitlines()] for text in texts]

    def _state_in_memory(self, host: str) -> None:
        """Put a host's state directory, which the lab keeps on this machine's disk, on a file
        system of its own, which may be filled; the host is booted to see it."""
        state = self.lab.directory / host / "state"
        labs.kill_host(self.lab, host)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "state", state], check=True)
        labs.boot_host(self.lab, host)
        self.session.start_agent(host)

    # ---- what people ask ----

    def status(self) -> Status | None:
        """None while the orchestrator does not answer."""
        with suppress(LiveshiftError), Client(self.lab.socket) as client:
            return client.get(Status, GetStatus(), timeout=1.0)
        return None

    def migrate(self) -> None:
        """Ask for the migration of the cell; it has begun when this returns."""
        ask = Migrate(self.capsule, self.destination, "a cell", dry_run=False)
        with Client(self.lab.socket) as client:
            self.migration = client.get(Named, ask).name

    def row(self) -> MigrationRow:
        with Client(self.lab.socket) as client:
            return client.get(MigrationDetails, GetMigration(self.migration)).row

    def is_over(self) -> bool:
        """Whether the orchestrator says that the migration is over."""
        status = self.status()
        return status is not None and self.migration not in {row.name for row in status.moving}

    def all_up(self) -> bool:
        status = self.status()
        return status is not None and all(row.state == "up" for row in status.hosts)
