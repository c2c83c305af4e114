# SPDX-License-Identifier: Apache-2.0
"""What all tables of the matrix play on: a lab, and a training job of two, made where needed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab_place import lab_name
from lab_session import BRISK, LONG, LabSession
from moving_job import Job
from reference_runs import References

from liveshift.errors import LiveshiftError
from liveshift.launcher.client.client import Client
from liveshift.launcher.lab import Lab
from liveshift.runtime.messages import GetStatus, Status

from .held import Held

RANKS = 2
HARMED = 1
"""The rank whose capsule is moved or harmed."""

SUSPICION_S = 1.5
HEARTBEAT_S = 0.3
TIMEOUTS = f"collective=120,heartbeat={HEARTBEAT_S},suspicion={SUSPICION_S},grace=1"
"""So that a cell with a dead host takes seconds."""

LONGEST_S = 4 * SUSPICION_S
"""That harm lasts while what is harmed is not over: some waits until it is healed."""

FEW_STEPS = 2000
"""The reference has this many steps before a job begins: enough for the cells of the short form."""

LAST_STEP = int(LONG[LONG.index("--steps") + 1])

Step = dict[str, Any]


class Stage:
    """The lab and the job as cells find them: whole, and nothing under way. ``stall_s``: how many
    seconds a daemon is stalled."""

    lab_options: tuple[str, ...] = ()
    run_options: tuple[str, ...] = ()
    cell_steps = 600
    """A cell takes fewer steps than this. A job with fewer left is replaced before a cell."""

    def __init__(self, place: Path, references: References, stall_s: float) -> None:
        self.stall_s = stall_s
        self.held = Held(place / "faultpoints")
        self._place = place
        self._references = references
        self._reference: list[list[Step]] = []
        self._session: LabSession | None = None
        self._job: Job | None = None
        self._numbers = itertools.count(1)

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
        return f"{self.job.name}/{HARMED}"

    def prepare(self) -> None:
        """Have a lab, and a job that trains with steps enough to go."""
        if not self._reference:  # before there is a job whose steps it would take time from
            self._read_reference(FEW_STEPS)
        if self._session is None:
            self._session = LabSession(lab_name("m"), self._place)
            self._session.up(*self.lab_options, "--timeouts", TIMEOUTS, *BRISK)
            self.lab_is_up()
        if self._job is not None and len(self.job.steps()) > LAST_STEP - self.cell_steps:
            self.end_job()
        if self._job is None:
            name = f"long{next(self._numbers)}"
            self._job = self.session.start(name, LONG, nnodes=RANKS, options=self.run_options)
            self._job.wait_step(5)
        self._read_reference(len(self.job.steps()) + self.cell_steps)
        self.held.clear()

    def lab_is_up(self) -> None:
        """To be called once for each lab, before there is a job."""

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

    # ---- its steps ----

    def reference(self, rank: int) -> Sequence[Step]:
        """The steps of a run that nobody disturbed."""
        return self._reference[rank]

    def assert_steps_are_right(self, since: Sequence[int]) -> None:
        """The steps of each rank, ``since`` so many, are those of a run that nobody disturbed, to
        the bit."""
        for rank in range(RANKS):
            steps, reference = self.job.steps(rank), self.reference(rank)
            for at in range(since[rank], len(steps)):
                for what in ("step", "loss_hex", "sha256"):
                    found, wanted = steps[at][what], reference[at][what]
                    assert found == wanted, f"rank {rank}, step {at + 1}: {what} is {found}"

    def longest_gap(self, since: float) -> float:
        """The longest time between two steps of a rank, in seconds, from the last step before
        ``since`` (time.time()) on. Steps that a rewind has taken back do not count."""
        gaps = [0.0]
        for rank in range(RANKS):
            times = [float(step["time"]) for step in self.job.steps(rank)]
            gaps += [later - one for one, later in itertools.pairwise(times) if later > since]
        return max(gaps)

    def _read_reference(self, steps: int) -> None:
        """Have so many steps of it before a cell begins; a longer run goes twice as far at once."""
        if self._reference and len(self.reference(0)) >= min(steps, LAST_STEP):
            return
        further = min(2 * steps if self._reference else steps, LAST_STEP) - 1
        directory = self._references.further_than(further, LONG, RANKS)
        texts = ((directory / f"rank{rank}.jsonl").read_text() for rank in range(RANKS))
        self._reference = [[json.loads(line) for line in text.splitlines()] for text in texts]

    # ---- what people ask ----

    def status(self) -> Status | None:
        """None while the orchestrator does not answer."""
        with suppress(LiveshiftError), Client(self.lab.socket) as client:
            return client.get(Status, GetStatus(), timeout=1.0)
        return None

    def all_up(self) -> bool:
        status = self.status()
        return status is not None and all(row.state == "up" for row in status.hosts)
