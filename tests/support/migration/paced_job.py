# SPDX-License-Identifier: Apache-2.0
"""A job that a pre-copy slows down, played with a clock of its own."""

from __future__ import annotations

from liveshift.runtime.agent.departure.throttle import Throttle
from liveshift.runtime.agent.host.reading_cost import ReadingCost

BATCH = 4 << 20
READS = 3e9
"""Bytes per second of one that reads without a pause."""


class Job:
    """A job of 100 collectives per second that loses ``harm`` seconds to each GB that is read. It
    makes those of a step of ``step`` seconds in the last ``burst`` of them. Reading a GB takes the
    agent ``dear`` CPU seconds."""

    def __init__(
        self, harm: float, step: float = 0.01, burst: float = 0.01, dear: float = 1.0
    ) -> None:
        self.now = 0.0
        self.used = 0.0  # CPU seconds of the agent
        self.harm, self.step, self.burst, self.dear = harm, step, burst, dear
        self.cost = ReadingCost(lambda: self.used)
        self.rests: list[float] = []  # of one whose clock stands meanwhile
        self.worked = 0.0  # seconds, of its own
        self.read_bytes = 0

    @property
    def done(self) -> int:
        steps, within = divmod(self.worked, self.step)
        part = max(0.0, within - (self.step - self.burst)) / self.burst
        return int(100 * self.step * (steps + part))

    def read(self, size: int = BATCH) -> None:
        self.rest(size / READS)
        self.worked -= self.harm * size / 1e9
        self.used += self.dear * size / 1e9
        self.read_bytes += size

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def pace(
        self,
        usual: float = 100.0,
        share: float | None = 0.2,
        cpus: int = 2,
        *,
        sees_all: bool = True,
        least: float = 0.0,
    ) -> Throttle:
        return Throttle(
            lambda: self.done,
            usual,
            share,
            lambda: self.now,
            self.rest,
            cpus,
            self.cost,
            sees_all=sees_all,
            least=lambda: least,
        )


class Steady(ReadingCost):
    """What it cost at first is what it costs."""

    def count(self, reader: int, read: int, now: float) -> int:
        return 1


def play(job: Job, pace: Throttle, seconds: float) -> tuple[float, float]:
    """Read for so long; what came of the second half of it: the share of its speed that the job has
    lost, bytes per second."""
    half: tuple[float, float, int] | None = None
    until = job.now + seconds
    while job.now < until:
        job.read()
        pace.account(BATCH)
        if half is None and job.now > until - seconds / 2:
            half = (job.now, job.worked, job.read_bytes)
    assert half is not None
    took = job.now - half[0]
    return 1 - (job.worked - half[1]) / took, (job.read_bytes - half[2]) / took
