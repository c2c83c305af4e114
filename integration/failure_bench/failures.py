# SPDX-License-Identifier: Apache-2.0
"""When what fails, in a job that meets one failure after the other until it has made its steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from .cases import Effort


class Kind(StrEnum):
    """What is lost: the host, with all that runs there, or only the process of a rank."""

    HOST = "host"
    PROCESS = "process"


CAUSES = {
    Kind.PROCESS: {
        **{"GPU or NVLink": 148, "HBM3": 72, "software": 54, "SRAM": 19, "GPU processor": 17},
        **{"NCCL watchdog": 7},
    },
    Kind.HOST: {"switch or cable": 35, "host maintenance": 32, "NIC": 7, "heat": 6, "CPU": 2},
}
"""Causes of the 419 unplanned interruptions of Llama 3's training on 16,384 GPUs in 54 days, as far
as its report names them (The Llama 3 Herd of Models, table 5), by what they take from a job: a rank
that its device or its own code ends, or a host. Left out: silent data corruption (6), which nobody
notices as it happens. The report counts software and maintenance in per cent of all."""

PROCESSES, HOSTS = 4, 1
"""Of five failures: 317 of 399 causes above end a process, which is 79 %."""


class Failure(msgspec.Struct, frozen=True):
    """``gap``: seconds since the job could stand this failure, as it was whole again after the one
    before. ``rank``: whose process or host is lost."""

    gap: float
    kind: Kind
    rank: int


def schedule(effort: Effort, ranks: int) -> Iterator[Failure]:
    """Without an end, and the same for all ways. Gaps have an exponential distribution. Of each
    five failures four are of processes."""
    chance = random.Random(effort.seed)  # to be the same every time
    kinds = list[Kind]()
    while True:
        if not kinds:
            kinds = [Kind.PROCESS] * PROCESSES + [Kind.HOST] * HOSTS
            chance.shuffle(kinds)
        yield Failure(chance.expovariate(1 / effort.mean), kinds.pop(), chance.randrange(ranks))
