# SPDX-License-Identifier: Apache-2.0
"""What is measured: kinds of job × sizes × links; what a case needs, about how long it takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import psutil

from liveshift.errors import Refused

SIZES = (0.25, 1.0, 4.0, 8.0)
"""GB resident."""
KINDS = {
    "hot": "a GPT with AdamW on the CPU: every step writes all of its memory",
    "cold": "a small GPT that reads a large data set in memory, which nobody writes",
    "ddp": "as hot, data-parallel in a group of one: its collectives tell what a pre-copy costs",
}
USUAL = "hot,cold"
LINKS = {"unlimited": "none", "10g": "10gbit", "1g": "1gbit"}
"""Names, and what ``liveshift lab link`` calls these rates."""
RATES = {"unlimited": 1.5e9, "10g": 1.15e9, "1g": 0.118e9}
"""About what crosses them, bytes per second: for the estimate."""

COPIES = 2.0
"""How many times a job's memory the machine must hold at once, being source and destination: the
frozen tree and what has come of it; two images; or a job with the checkpoint that it reads."""
BESIDE = 2_500_000_000
"""Bytes that the lab's daemons, Python and the machine itself need."""

SETTLED_S = 8.0
"""How long a job has trained before its first move. By then liveshift knows its usual speed, and so
can measure what a move costs: it needs 2 s, and looks with each beat, in this lab every 2 s."""

WAYS = ("auto", "stop", "round", "rounds")
"""``precopy.way`` of the lab's cluster file: what the product chooses, or one that is forced."""


class Case(msgspec.Struct, frozen=True):
    """One job on one link, moved by one way."""

    kind: str
    gb: float
    link: str
    way: str = "auto"

    @property
    def name(self) -> str:
        forced = "" if self.way == "auto" else f"-{self.way}"
        return f"{self.kind}-{self.gb:g}-{self.link}{forced}"

    @property
    def shared(self) -> tuple[str, float, str]:
        """What it has in common with the same job by other ways: limits, moves by hand."""
        return self.kind, self.gb, self.link

    @property
    def size(self) -> int:
        """Bytes resident."""
        return round(self.gb * 1e9)


class Effort(msgspec.Struct, frozen=True):
    """How often each thing is done."""

    moves: int = 5
    hands: int = 5
    restarts: int = 5
    threads: int = 1
    every: int = 100
    """Steps between two checkpoints."""


def chosen(kinds: str, sizes: str, links: str, ways: str = "auto") -> list[Case]:
    """From lists with commas, all of them, or the usual kinds, where a list is empty; raises
    Refused."""
    return [
        Case(kind, size, link, way)
        for kind in _among(kinds or USUAL, tuple(KINDS), "kind of job")
        for size in _sizes(sizes)
        for link in _among(links, tuple(LINKS), "link")
        for way in _among(ways or "auto", WAYS, "way")
    ]


def lacking(case: Case, available: int | None = None) -> str:
    """Why the machine's memory does not suffice, in words; "" when it does."""
    have = psutil.virtual_memory().available if available is None else available
    need = int(case.size * COPIES) + BESIDE
    if have >= need:
        return ""
    times = f"{COPIES:g} times {case.gb:g} GB and {BESIDE / 1e9:g} GB beside"
    return f"needs {need / 1e9:.1f} GB of memory ({times}), there are {have / 1e9:.1f} GB"


def step_s(case: Case) -> float:
    """About how long a step takes on one core."""
    return 0.09 if case.kind == "cold" else max(0.06, 0.22 * case.gb)


def around(case: Case) -> int:
    """Steps that are made before a move and after it, at least: a dozen, or where they are slow as
    many as tell what a usual one takes."""
    return max(5, min(12, round(6 / step_s(case))))


def seconds(case: Case, effort: Effort) -> float:
    """About how long a case takes, without what its size's cases share."""
    copy = case.size / RATES[case.link]
    settle = (3 + 2 * around(case)) * step_s(case) + 4
    start = 6 + 2 * case.gb
    ours = start + SETTLED_S + effort.moves * (2.5 * copy + 1.0 * case.gb + settle + 2)
    hand = start + effort.hands * (copy + 3 * case.gb + settle + 2)
    return ours + hand + 4


def shared_seconds(case: Case, effort: Effort) -> float:
    """About how long the reference run and the restarts take, once for all links of a size."""
    redone = 0.7 * effort.every * step_s(case)
    restarts = effort.restarts * (redone + 6 + 2 * case.gb)
    precopy = 2.5 * case.size / RATES[case.link]
    steps = effort.moves * (2 * around(case) + precopy / step_s(case))
    return restarts + steps * step_s(case) + 10


def estimate(cases: Sequence[Case], effort: Effort) -> float:
    """Seconds."""
    groups = {(case.kind, case.gb): case for case in cases}
    own = sum(seconds(case, effort) for case in cases)
    return 25 + own + sum(shared_seconds(case, effort) for case in groups.values())


def _among(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [word for word in re.split(r"[,\s]+", text) if word] or list(known)
    for name in names:
        if name not in known:
            raise Refused(f'no {what} "{name}"', hint=f"there are: {', '.join(known)}")
    return names


def _sizes(text: str) -> list[float]:
    words = [word for word in re.split(r"[,\s]+", text) if word]
    try:
        found = [float(word) for word in words] or list(SIZES)
    except ValueError:
        raise Refused(f'"{text}" are no sizes', hint="such as 0.25,1,4 (GB)") from None
    if not all(0.2 <= size <= 1000 for size in found):
        raise Refused(f"sizes {text}", hint="0.2 GB at least: torch itself needs 0.15")
    return found
