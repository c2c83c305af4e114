# SPDX-License-Identifier: Apache-2.0
"""liveshift: snapshots all the time, a rewind when a host is lost. The script knows nothing."""

from __future__ import annotations

import math
import time

from lab_session import LabSession, eventually

from liveshift.launcher import lab as labs
from liveshift.runtime.messages import Event, ProtectionRow

from .cases import Case, training
from .history import History

LOOK_S = 0.25
UP_S = 20.0
OFTEN = ("--max-rewinds", "1000")
"""A schedule of failures has more in an hour than a job in earnest should survive."""


class Rewinding:
    """The job in a lab whose hosts liveshift runs; it takes snapshots unless the lab has none."""

    def __init__(self, session: LabSession, case: Case, steps: int, pace: float) -> None:
        self.lab = session.lab
        self._session = session
        name = f"{case.name}-{'paced' if pace else 'steady'}".replace(".", "-").replace("+", "-")
        self.job = session.start(
            name, training(case, steps, pace), nnodes=case.ranks, options=OFTEN
        )
        self.history = History(self.job.out, case.ranks, case.ranks)
        self.pauses: dict[str, float] = {}
        """By snapshot: for how long the job stood."""
        self.image_bytes = 0
        self._looked = 0.0
        self._row = ProtectionRow()
        self._state = ""
        self._began = math.inf

    def alive(self) -> None:
        if time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        row = next(row for row in self._session.status().jobs if row.name == self.job.name)
        ended = row.state == "ended" and row.code != 0
        assert not ended, f"{row.name} ended with {row.code}:\n{self.job.output()}"
        self._state = row.state
        if row.protection is None:
            return
        self._row = row.protection
        if self._row.newest and self._row.pause_s:
            self.pauses.setdefault(self._row.newest, self._row.pause_s)
            self.image_bytes = self._row.bytes

    def ready(self) -> bool:
        """It has a snapshot at a holder which is up, made since the last rewind."""
        self._looked = 0.0
        self.alive()
        return bool(self._row.newest) and not self._row.why_not and self._state == "running"

    def trained(self) -> bool:
        """It has one since it has begun to train. One of before lacks the memory that a large rank
        fills first."""
        return self.ready() and time.time() - self._row.age >= self._first_step()

    def _first_step(self) -> float:
        """When rank 0 made its first step, in seconds since 1970; inf if it has not yet."""
        if self._began == math.inf:  # the job also notes what is no step
            steps = (line for line in self.job.steps(0) if "loss_hex" in line)
            self._began = next((float(line["time"]) for line in steps), math.inf)
        return self._began

    def host_of(self, rank: int) -> str:
        return self.job.seen(rank).host

    def process_of(self, rank: int) -> int:
        (pid,) = self.job.seen(rank).tasks.values()
        return pid

    def taken_back(self, cut: float) -> bool:
        """Whether the job was rewound since then."""
        return any(each.kind == "rewound" for each in self._since(cut))

    def _since(self, cut: float) -> list[Event]:
        return [each for each in self._session.history(self.job.name) if each.time >= cut]

    def noticed(self, cut: float) -> tuple[float | None, str]:
        events = self._since(cut)
        began = next((e.time for e in events if e.kind == "rewinding" and "goes back" in e.text), 0)
        assert began, f"there was no rewind: {events}"
        told = [each.text for each in events if each.kind == "rewound"]
        assert len(told) <= 1, f"one host was killed, and the job was rewound again: {told}"
        return began, "; ".join(told)

    def lost(self, host: str) -> None:
        """The spare is there already."""

    def replace(self, host: str) -> None:
        labs.boot_host(self.lab, host)
        self._session.start_agent(host)
        eventually(lambda: self._session.host(host).state == "up", f"{host} to be up", UP_S)

    def restart(self, host: str) -> None:
        """The rewind has brought the process back."""

    def ended(self) -> bool:
        self._looked = 0.0
        self.alive()
        return self._state == "ended"

    def said(self) -> str:
        return self._session.last_words()
