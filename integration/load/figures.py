# SPDX-License-Identifier: Apache-2.0
"""What a run with a number of hosts came to. Seconds, bytes, messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """How long something took, over ``count`` times; NaN-free: zeros where nothing was seen."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(0, 0.0, 0.0, 0.0)
        rising = sorted(seconds)
        last = len(rising) - 1
        return cls(len(rising), rising[last // 2], rising[round(0.99 * last)], rising[-1])


class Around(msgspec.Struct, frozen=True):
    """What else went on meanwhile: cores that the simulated hosts kept busy, and others' programs
    on this machine; and by how much the simulated hosts themselves were late."""

    crowd: float
    others: float
    lag: Spread


class AtRest(msgspec.Struct, frozen=True):
    """Heartbeats and somebody who looks at the status, nothing else."""

    seconds: float
    cores: float
    resident: int
    descriptors: int
    threads: int
    messages_per_s: float
    heartbeat: Spread
    status: Spread
    status_bytes: int
    around: Around
    silences: int


class Moves(msgspec.Struct, frozen=True):
    """All migrations asked for at once, while that goes on.

    ``seconds``: from the first request until the last migration is over; none gets past its first
    question before all are asked for, which took ``asking_s``.
    ``at_once``: the most that were under way together; ``frozen_floor``, ``floor``: what the
    simulated steps alone take, of ``frozen`` and of ``seconds``; ``cpu_each``: what a migration
    costs the orchestrator beyond its rest, until the last host has heard of it.
    """

    asked: int
    done: int
    at_once: int
    seconds: float
    asking_s: float
    floor: float
    each: Spread
    frozen: Spread
    frozen_floor: float
    cpu_each: float
    cores: float
    messages_per_s: float
    claims: int
    heartbeat: Spread
    status: Spread
    around: Around
    silences: int
    resident: int
    errors: list[str]


class Restart(msgspec.Struct, frozen=True):
    """The orchestrator killed in the middle of migrations, and started anew.

    ``seconds``: until every host has said hello and is up; ``settled_s``: until no migration is
    under way; ``moved`` of ``asked`` went on to their end, the others were rolled back.
    """

    seconds: float
    settled_s: float
    cpu: float
    asked: int
    moved: int


class Run(msgspec.Struct, frozen=True):
    """``connect_s``: from the first connection until every host is up; ``end_s``: from SIGTERM to
    every job until all have ended. ``wrong``: what must not be."""

    hosts: int
    capsules: int
    jobs: int
    connect_s: float
    start_s: float
    start_cpu: float
    rest: AtRest
    moves: Moves
    restart: Restart
    end_s: float
    end_cpu: float
    wrong: list[str]
