# SPDX-License-Identifier: Apache-2.0
"""What is measured: ways × sizes × ranks × how soon a silent host counts as lost; when which host
dies."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec
import psutil
from lab_session import JOBS

from liveshift.errors import Refused

SIZES = (0.25, 0.5)
"""GB resident, of each rank. An interpreter in which torch has trained has 0.24 GB of its own."""
RANKS = (2,)
MOST_RANKS = 16
UNTOUCHED = "untouched"
WAYS = {
    UNTOUCHED: "torchrun, no host dies and nothing is saved",
    "rewind": "liveshift's snapshots, and rewinds to them",
    "checkpoint-restart": "torchrun restarts the workers, which begin from a checkpoint",
    "torchft": "a third replica computes along; the step in which a host dies is dropped",
}
NEEDS = {
    UNTOUCHED: "nothing",
    "rewind": "nothing",
    "checkpoint-restart": "code that saves and loads model, optimizer and step, and storage that"
    " all hosts share",
    "torchft": "a Manager, wrappers of model and optimizer, functions that save and load, a loop"
    " by the Manager's steps, and one host more that computes all the time",
}
"""What each way needs of the script and beside it."""
SUSPICIONS = {
    UNTOUCHED: (0.0,),
    "rewind": (1.0, 5.0),
    "checkpoint-restart": (3.0, 15.0),
    "torchft": (1.0, 5.0),
}
"""Seconds of silence after which a host counts as lost: the least that makes sense, and the
default. torchrun's keep-alive comes every whole second at most, and three of them may be late."""

STANDING_BY = 1
"""Hosts beside those that train; a host that was killed is booted and stands by next."""
BESIDE = 2_500_000_000
"""Bytes that daemons, Python and the machine itself need."""


class Case(msgspec.Struct, frozen=True):
    """``gb``: resident, of each rank. ``others``: of all ranks but the first, if that is another
    number; then only the first one's host dies. So one large rank can be lost where the memory does
    not suffice for several."""

    way: str
    gb: float
    suspicion: float = 0.0
    ranks: int = RANKS[0]
    others: float = 0.0

    @property
    def name(self) -> str:
        ranks = f"-{self.ranks}ranks" if self.ranks != RANKS[0] else ""
        after = f"-{self.suspicion:g}s" if self.suspicion else ""
        return f"{self.way}-{self.each}{ranks}{after}"

    @property
    def each(self) -> str:
        """The sizes, as text: "4", or "4+0.25"."""
        return f"{self.gb:g}+{self.others:g}" if self.others else f"{self.gb:g}"

    @property
    def job(self) -> tuple[str, int]:
        """What it has in common with the untouched run that it is compared with."""
        return self.each, self.ranks

    @property
    def mortal(self) -> int:
        """So many ranks, the first ones, may lose their hosts."""
        return 1 if self.others else self.ranks

    @property
    def hosts(self) -> int:
        return self.ranks + STANDING_BY

    @property
    def total(self) -> int:
        """Bytes resident, of all ranks together."""
        return round((self.gb + (self.ranks - 1) * (self.others or self.gb)) * 1e9)


class Effort(msgspec.Struct, frozen=True):
    """``kills`` of each case. ``every``: seconds between two snapshots; ``steps_every``: steps
    between two checkpoints. ``steady``: steps in which speed is measured, without any kill.
    ``steps``: of the job that meets failures, one in ``mean`` seconds; 0 for no such job.
    ``alarms``: how often a host falls silent for a moment and is counted as lost."""

    kills: int = 5
    every: float = 5.0
    steps_every: int = 100
    pace: float = 0.1
    steady: int = 600
    steps: int = 1500
    mean: float = 30.0
    alarms: int = 3
    seed: int = 1


class Moment(msgspec.Struct, frozen=True):
    """Which rank's host dies, and when: ``late`` of a step after the one numbered ``step``."""

    step: int
    late: float
    rank: int


APART = 3
"""Intervals of checkpoints from one kill to the next."""


def moments(effort: Effort, ranks: int) -> list[Moment]:
    """The kills, the same for all ways: each in an interval of checkpoints of its own, at any time
    in it. The intervals between are for coming back to a whole job with a spare."""
    chance = random.Random(effort.seed)  # to be the same every time
    return [
        Moment(
            effort.steps_every * (1 + APART * number) + chance.randrange(effort.steps_every),
            chance.random(),
            int(chance.random() * ranks),
        )
        for number in range(effort.kills)
    ]


ALARMED_STEPS = 300
"""Of the job whose hosts only fall silent."""

AFTER = 40
"""Steps after the last kill."""


def last_step(effort: Effort) -> int:
    """The step after which the jobs that lose hosts end, each as if nothing had been."""
    found = moments(effort, 1)
    return found[-1].step + AFTER if found else AFTER


def compared_steps(effort: Effort) -> int:
    """How many steps of the untouched run the others are compared with."""
    return max(effort.steady, effort.steps, last_step(effort), ALARMED_STEPS * bool(effort.alarms))


def training(case: Case, steps: int, pace: float) -> list[str]:
    """The command of a rank; ``{out}`` in it is the job's directory."""
    words = ["python", str(JOBS / "resumable.py"), "--out", "{out}"]
    words += ["--size", str(round(case.gb * 1e9)), "--steps", str(steps)]
    words += ["--others", str(round(case.others * 1e9))] if case.others else []
    return [*words, "--pace", f"{pace:g}"] if pace else words


def chosen(ways: str, sizes: str, ranks: str) -> list[Case]:
    """From lists with commas, all of them where a list is empty; raises Refused."""
    names = [word for word in re.split(r"[,\s]+", ways) if word] or list(WAYS)
    for name in names:
        if name not in WAYS:
            raise Refused(f'no way "{name}"', hint=f"there are: {', '.join(WAYS)}")
    words = [word for word in re.split(r"[,\s]+", sizes) if word]
    try:
        found = [_sizes(word) for word in words] or [(size, 0.0) for size in SIZES]
    except ValueError:
        hint = "such as 0.25,0.5 (GB), or 4+0.25 for a first rank of 4"
        raise Refused(f'"{sizes}" are no sizes', hint=hint) from None
    numbers = [word for word in re.split(r"[,\s]+", ranks) if word]
    if not all(word.isdecimal() and 2 <= int(word) <= MOST_RANKS for word in numbers):
        raise Refused(f'"{ranks}" are no numbers of ranks', hint=f"2 to {MOST_RANKS}, such as 2,4")
    if not all(0.25 <= size <= 100 for pair in found for size in pair if size):
        raise Refused(f"sizes {sizes}", hint="0.25 GB at least: torch itself needs 0.24")
    if UNTOUCHED not in names:
        names.insert(0, UNTOUCHED)  # what the others are compared with
    return [
        Case(way, size, suspicion, count, others)
        for size, others in found
        for count in (list(map(int, numbers)) or list(RANKS))
        for way in sorted(names, key=list(WAYS).index)
        if not (others and way == "torchft")  # each replica must be able to train every share
        for suspicion in SUSPICIONS[way]
    ]


def _sizes(word: str) -> tuple[float, float]:
    """The two sizes of a case, in GB; raises ValueError."""
    first, _, others = word.partition("+")
    return float(first), float(others) if others else 0.0


def lacking(case: Case, available: int | None = None) -> str:
    """Why the machine's memory does not suffice, in words; "" when it does."""
    have = psutil.virtual_memory().available if available is None else available
    # Ranks, or replicas with the spare; two snapshots of each rank, and what is restored from them.
    need = BESIDE + (4 * case.total if case.way == "rewind" else case.total + round(case.gb * 1e9))
    if have >= need:
        return ""
    return f"needs {need / 1e9:.1f} GB of memory, there are {have / 1e9:.1f} GB"


def estimate(cases: Sequence[Case], effort: Effort) -> float:
    """Seconds."""
    found = 0.0
    for case in cases:
        found += 20 + effort.steady * 0.06
        if case.way != UNTOUCHED:
            each = case.suspicion + 8 + 0.5 * effort.steps_every * effort.pace
            found += 20 + last_step(effort) * effort.pace + effort.kills * each
        if case.way == "rewind" and effort.alarms:
            found += 20 + effort.alarms * (effort.every + case.suspicion + 10)
        if effort.steps:
            each = 0.0 if case.way == UNTOUCHED else case.suspicion + 8
            found += 20 + effort.steps * effort.pace * (1 + each / effort.mean)
    return found
