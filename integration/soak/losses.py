# SPDX-License-Identifier: Apache-2.0
"""Hosts whose power is cut at random moments, and moves that leave the job protected meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from lab_session import LabSession, eventually
from moves_ended import ended
from moving_job import Job
from protected_job import events

from liveshift.errors import LiveshiftError
from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import GetStatus, JobRow, Migrate, MigrationRow, Named, Status

from .rounds import AGAIN_S, LOOK_S, STUCK_S, Rounds

NEAR_S = 10.0
"""A move that fails has failed of a loss if one was so many seconds before its end, or less."""


class Loss(msgspec.Struct, frozen=True):
    """``time``: of the cut, in seconds since 1970. ``ran``: whether the host ran a rank, or was
    just getting one; else it held images. ``back_s``: seconds until all ranks ran again, 0 for a
    host that ran none."""

    host: str
    time: float
    ran: bool
    back_s: float


class Losses:
    """Cuts the power of one host every ``mean`` seconds on average, never of ``spared``.

    A host comes back, and the job is protected, before the next one is cut: what is lost together
    with its only holder is lost. A cut may come at any moment of a move or of a snapshot.
    """

    def __init__(self, job: Job, mean: float, seed: int, spared: str) -> None:
        self.rows: list[Loss] = []
        self.down = False
        """Whether a host is off, or the job is not back yet."""
        self._job = job
        self._mean = mean
        self._chance = random.Random(seed)
        self._spared = spared
        self._stop = threading.Event()
        self._error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises what has gone wrong, once the last host is back."""
        thread = threading.Thread(target=self._run, name="losses")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while True:
                due += self._chance.expovariate(1 / self._mean)
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
                self._lose()
        except BaseException as error:
            self._error = error

    def _lose(self) -> None:
        session, job = self._job.session, self._job
        victims = eventually(lambda: self._victims(session), "the job to be protected", STUCK_S)
        runs = {job.capsule(index).host for index in range(job.nnodes)}
        host, before = self._chance.choice(victims), len(events(job, "rewound"))
        self.down, cut = True, time.time()
        labs.kill_host(session.lab, host)
        back = 0.0
        if host in runs:
            eventually(lambda: self._went_on(host, before), "the job to run", STUCK_S)
            rewound = events(job, "rewound")[before:]
            back = (rewound[-1].time if rewound else time.time()) - cut
        self.rows.append(Loss(host, cut, host in runs, back))
        session.boot(host)
        self.down = False

    def _went_on(self, host: str, before: int) -> bool:
        """Whether the job was rewound, or a rank that was coming to the host has gone back."""
        job = self._job
        if len(events(job, "rewound")) > before:
            return True
        row = next(row for row in job.session.status().jobs if row.name == job.name)
        return row.state == "running" and host not in {capsule.host for capsule in row.capsules}

    def _victims(self, session: LabSession) -> list[str]:
        """The hosts that may be lost now; none while the job would not survive it."""
        row = next(row for row in session.status().jobs if row.name == self._job.name)
        taken = _hosts(row)
        return sorted(taken - {self._spared}) if protected(row) else []


@dataclass
class SpareRounds(Rounds):
    """Moves to hosts that neither run a rank nor hold an image: a job whose holder gets a rank is
    not protected. ``rest``: the most seconds between two moves, so that snapshots are taken."""

    rest: float = 6.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def go(self, goes_on: Callable[[], bool]) -> None:
        with Client(self.socket) as client:
            while goes_on():
                if name := self._to_a_spare(client):
                    self.rows.append(ended(client, name, STUCK_S, LOOK_S))
                    time.sleep(self.chance.uniform(0, self.rest))
                else:
                    time.sleep(AGAIN_S)

    def _to_a_spare(self, client: Client) -> str:
        """Begin a move; "" if none is possible now."""
        status = client.get(Status, GetStatus())
        row = next(row for row in status.jobs if row.name == self.job)
        up = {host.name for host in status.hosts if host.state == "up"}
        free = sorted(up - _hosts(row))
        if not (free and protected(row)):
            return ""
        capsule = f"{self.job}/{len(self.rows) % self.ranks}"
        try:
            return client.get(Named, Migrate(capsule, free[0], "soak", False)).name
        except LiveshiftError:  # it is refused, or a host has just been lost
            self.refused += 1
            return ""


def protected(row: JobRow) -> bool:
    """Whether the job survives the loss of any one host."""
    seen = row.protection
    return row.state == "running" and seen is not None and bool(seen.newest) and not seen.why_not


def unexplained(failed: Sequence[MigrationRow], losses: Sequence[Loss]) -> list[str]:
    """The moves that failed though no host was lost, in words."""
    return [
        f"{row.name} {row.state}, and no host was lost then: {row.error}"
        for row in failed
        if not any(
            row.asked - NEAR_S <= each.time <= row.asked + row.seconds + NEAR_S for each in losses
        )
    ]


def _hosts(row: JobRow) -> set[str]:
    """Those that run a rank of the job, or hold an image of it."""
    holders = row.protection.holders if row.protection else ()
    return {capsule.host for capsule in row.capsules if capsule.host} | set(holders)
