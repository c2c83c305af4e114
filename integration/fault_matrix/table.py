# SPDX-License-Identifier: Apache-2.0
"""Which pairs of a point and a fault there are, and what each must come to.

    s  stayed: the capsule goes on at its source          .  there is nothing there to be harmed
    m  moved: it goes on at its destination               1… either, for the reason of that number
    e  ended: nobody can go on; the job ends with code 137

A capital letter, or * before a number, is a cell of the short form too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from liveshift.runtime.daemon.faultpoints import POINTS

from . import faults, memory
from .faults import Fault, orchestrator
from .scene import USUAL, Order, Scene, destination, source
from .verdict import AnyCell

TABLE = "moves"
STAYED, MOVED, ENDED, EITHER = "stayed", "moved", "ended", "either"

DEAF = (
    "source.locked",
    "source.dumped",
    "source.promised",
    "orchestrator.frozen",
    "orchestrator.committed",
    "destination.restoring",
    "destination.claiming",
)
"""Where nothing may reach the capsule: the kernel would acknowledge what its sockets got, and the
image would not have it."""

OUTCOMES = {"s": STAYED, "m": MOVED, "e": ENDED}

FAULTS: dict[str, Fault[Scene]] = {
    "orchestrator-killed": faults.daemon_killed(orchestrator),
    "source-agent-killed": faults.daemon_killed(source),
    "destination-agent-killed": faults.daemon_killed(destination),
    "image-used-up": faults.image_used_up(destination),
    "dump-killed": faults.criu_killed(source, "dump"),
    "restore-killed": faults.criu_killed(destination, "restore"),
    "capsule-killed-at-source": faults.capsule_killed(source),
    "capsule-killed-at-destination": faults.capsule_killed(destination),
    "cut-source-destination": faults.cut_between(source, destination),
    "cut-source-orchestrator": faults.cut_between(source, orchestrator),
    "cut-destination-orchestrator": faults.cut_between(destination, orchestrator),
    "source-cut-off": faults.cut_off(source),
    "destination-cut-off": faults.cut_off(destination),
    "source-power-lost": faults.power_lost(source),
    "destination-power-lost": faults.power_lost(destination),
    "images-full": faults.images_full(destination),
    "state-full": faults.state_full(destination),
    "out-of-memory": faults.out_of_memory(destination),
    "bits-flipped": faults.bits_flipped(destination),
    "orchestrator-stalled": faults.daemon_stalled(orchestrator),
    "source-agent-stalled": faults.daemon_stalled(source),
    "destination-agent-stalled": faults.daemon_stalled(destination),
}


#                                 prepared precopied locked dumped promised frozen committed
#                                          restoring claiming granted running resumed finishing
_GRID = """
orchestrator-killed               S s 1 1 1 m M m m m m m m
source-agent-killed               2 s s S s m m m m m m m m
destination-agent-killed          s S s s s *2 2 s s m M m m
image-used-up                     . . . . . s s s S M m m .
dump-killed                       . . . S m m m m m m m . m
restore-killed                    . . . . . . . . m M . . .
capsule-killed-at-source          e e E e e m m m m m m m M
capsule-killed-at-destination     s s s s s s s S s s e E e
cut-source-destination            s s s S s m m m m m m m m
cut-source-orchestrator           s s m m m M m m m m m m m
cut-destination-orchestrator      s s s s s s s S s m m m m
source-cut-off                    s s s s S m m m m m m m m
destination-cut-off               s s s s s s s s S m m m m
source-power-lost                 e e e E e m m m m m m m m
destination-power-lost            s s S s s s s s s e e e e
images-full                       s S s s s s s m m m . . .
state-full                        s s s s S s s s s m . . .
out-of-memory                     s s S . . . . . . . . . .
bits-flipped                      M m m M . . . . . . . . .
orchestrator-stalled              m m m m m m m m m m m M m
source-agent-stalled              s S s s s m m m m m m m m
destination-agent-stalled         s s s s s s s s s M m m m
"""


REASONS: dict[str, str] = {
    "1": "the image may be complete when the restarted orchestrator asks for it",
    "2": "an agent that is back in time takes the ask that the one before did not get",
}
"""Why a cell may come to either end, by its number in the grid."""


SomeCell = TypeVar("SomeCell", bound=AnyCell)


@dataclass(frozen=True)
class Cell:
    """One pair; ``expected`` is STAYED, MOVED, ENDED, or EITHER for ``reason``. ``held_at``: the
    fault point at which a daemon is held."""

    held_at: str
    fault: str
    expected: str
    reason: str
    short: bool
    order: Order = USUAL

    @property
    def table(self) -> str:
        return TABLE

    @property
    def point(self) -> str:
        return self.held_at

    @property
    def name(self) -> str:
        return f"{self.point}/{self.fault}"

    @property
    def harm(self) -> Fault[Scene]:
        return FAULTS[self.fault]


def cells(wanted: str = "", short: bool = False) -> list[Cell]:
    """All cells, those of the short form, or those whose name has one of several patterns in it.

    ``wanted`` is a list such as "source.*/dump-killed,power-lost".
    """
    return picked(_all(), wanted, short)


def picked(every: Iterable[SomeCell], wanted: str, short: bool) -> list[SomeCell]:
    """Those of a table's cells that are asked for; as cells()."""
    patterns = [f"*{word}*" for word in wanted.split(",") if word]
    return [
        cell
        for cell in every
        if (cell.short or not short)
        and (not patterns or any(fnmatchcase(cell.name, p) for p in patterns))
    ]


def unavailable(cell: Cell) -> str:
    """Why a cell cannot be tried on this machine; empty when it can."""
    return memory.unavailable() if cell.fault == "out-of-memory" else ""


def _all() -> Iterator[Cell]:
    for line in _GRID.split("\n")[1:-1]:
        fault, *marks = line.split()
        assert len(marks) == len(POINTS), f"{fault} has {len(marks)} cells"
        for point, mark in zip(POINTS, marks, strict=True):
            if mark != ".":
                yield _cell(point, fault, mark)


def _cell(point: str, fault: str, mark: str) -> Cell:
    word = mark.removeprefix("*")
    expected = OUTCOMES.get(word.lower(), EITHER)
    reason = REASONS[word] if expected == EITHER else ""
    return Cell(point, fault, expected, reason, short=mark[0] == "*" or word.isupper())
