# SPDX-License-Identifier: Apache-2.0
"""The table of snapshots: which harm is done at which point, and what each must come to.

    t  the job trains on, without a rewind          .  there is nothing there to be harmed
    r  it is rewound, and trains on                 1… one of several, for the reason of that number
    s  it is suspended and resumed, and trains on
    l  it is lost, and says why

A capital letter is a cell that CI plays too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import faults, snapshot_harms
from .faults import Fault, orchestrator
from .snapshot_scene import SnapshotScene, holder, owner
from .table import EITHER, picked

TABLE = "snapshots"
TRAINED_ON, REWOUND, RESUMED, LOST = "trained on", "rewound", "resumed", "lost"
OUTCOMES = {"t": TRAINED_ON, "r": REWOUND, "s": RESUMED, "l": LOST}


@dataclass(frozen=True)
class Column:
    """``during``: snapshot or suspension; rewind of a job that has lost a rank, so that its hosts
    have copies of the images; loss, which is the rewind of one that has lost the owner, so that
    the holder is needed; suspended if nothing is under way. Then there is no ``point`` at which a
    daemon is held."""

    name: str
    during: str
    point: str


COLUMNS = (
    Column("snapshot.locked", "snapshot", "snapshot.locked"),
    Column("snapshot.dumped", "snapshot", "snapshot.dumped"),
    Column("snapshot.complete", "snapshot", "snapshot.complete"),
    Column("rewind.committed", "rewind", "rewind.committed"),
    Column("rewind.ended", "rewind", "rewind.ended"),
    Column("rewind.forwarded", "rewind", "rewind.forwarded"),
    Column("loss.committed", "loss", "rewind.committed"),
    Column("loss.forwarded", "loss", "rewind.forwarded"),
    Column("suspension.dumped", "suspension", "snapshot.dumped"),
    Column("suspension.complete", "suspension", "snapshot.complete"),
    Column("suspension.ended", "suspension", "rewind.ended"),
    Column("suspended", "suspended", ""),
)
POINTS = tuple(column.name for column in COLUMNS)

FAULTS: dict[str, Fault[SnapshotScene]] = {
    "orchestrator-killed": faults.daemon_killed(orchestrator),
    "orchestrator-stalled": faults.daemon_stalled(orchestrator),
    "owner-agent-killed": faults.daemon_killed(owner),
    "owner-agent-stalled": faults.daemon_stalled(owner),
    "owner-cut-off": faults.cut_off(owner),
    "owner-power-lost": faults.power_lost(owner),
    "holder-agent-killed": faults.daemon_killed(holder),
    "holder-agent-stalled": faults.daemon_stalled(holder),
    "holder-cut-off": faults.cut_off(holder),
    "holder-power-lost": faults.power_lost(holder),
    "cut-owner-holder": faults.cut_between(owner, holder),
    "cut-owner-orchestrator": faults.cut_between(owner, orchestrator),
    "cut-holder-orchestrator": faults.cut_between(holder, orchestrator),
    "rank-killed": snapshot_harms.rank_killed(),
    "dump-killed": faults.criu_killed(owner, "dump"),
    "images-full": faults.images_full(holder),
    "bits-flipped": faults.bits_flipped(holder),
    "held-image-flipped": snapshot_harms.image_flipped([holder]),
    "all-images-flipped": snapshot_harms.image_flipped([holder, owner]),
}

CUT_OFF = {
    "owner-cut-off": owner,
    "holder-cut-off": holder,
    "cut-owner-orchestrator": owner,
    "cut-holder-orchestrator": holder,
}
"""Which host cannot hear that the job was rewound: an earlier copy may run there."""

TELLS = {
    "snapshot.complete/held-image-flipped": "is not what its source has sent",
    "rewind.committed/all-images-flipped": "is damaged",
    "loss.committed/held-image-flipped": "is damaged",
    "suspended/held-image-flipped": "is damaged",
}
"""What people must be told of the harm that a cell does: else nobody has noticed it."""

#               snapshot: locked dumped complete   rewind: committed ended forwarded
#                      loss: committed forwarded   suspension: dumped complete ended   suspended
_GRID = """
orchestrator-killed      t t t   R r r   r r   t S s   S
orchestrator-stalled     t t t   r r r   r r   t 3 s   s
owner-agent-killed       t T t   r r r   . .   t s s   s
owner-agent-stalled      t t t   r r r   . .   t s s   s
owner-cut-off            1 1 r   r r r   . .   1 s s   .
owner-power-lost         r r r   r r R   . .   r s s   s
holder-agent-killed      t t t   r r r   r R   t s s   s
holder-agent-stalled     t t t   r r r   r r   t s s   s
holder-cut-off           t t t   r r r   r r   t s s   s
holder-power-lost        t t t   r r r   l l   t l l   S
cut-owner-holder         t t t   r r r   . .   t s s   .
cut-owner-orchestrator   t t t   r r r   . .   t s s   .
cut-holder-orchestrator  t t t   r r r   r r   t s s   s
rank-killed              r R r   . . .   . .   r s .   .
dump-killed              . T .   . . .   . .   t . .   .
images-full              t t t   r r .   r r   2 . .   .
bits-flipped             t t .   . . .   . .   2 . .   .
held-image-flipped       . . t   r . .   l .   . . .   S
all-images-flipped       . . .   l . .   . .   . . .   .
"""

REASONS: dict[str, tuple[frozenset[str], str]] = {
    "1": (
        frozenset({TRAINED_ON, REWOUND}),
        "a host that fell silent in a pause is lost sooner if its peers do not reach it either",
    ),
    "2": (
        frozenset({TRAINED_ON, RESUMED}),
        "what is left of the image may fit, or come again",
    ),
    "3": (
        frozenset({TRAINED_ON, RESUMED}),
        "after a long stall the orchestrator decides before it hears the hosts, and gives up",
    ),
}
"""What a cell may come to, and why it is not always the same, by its number in the grid."""


@dataclass(frozen=True)
class SnapshotCell:
    """One pair; ``outcomes``: what it may come to, several for ``reason``."""

    column: Column
    fault: str
    outcomes: frozenset[str]
    reason: str
    short: bool

    @property
    def table(self) -> str:
        return TABLE

    @property
    def point(self) -> str:
        return self.column.name

    @property
    def name(self) -> str:
        return f"{self.point}/{self.fault}"

    @property
    def expected(self) -> str:
        return EITHER if len(self.outcomes) > 1 else next(iter(self.outcomes))

    @property
    def harm(self) -> Fault[SnapshotScene]:
        return FAULTS[self.fault]


def cells(wanted: str = "", short: bool = False) -> list[SnapshotCell]:
    """As table.cells; ``short``: those that CI plays."""
    return picked(_all(), wanted, short)


def _all() -> Iterator[SnapshotCell]:
    for line in _GRID.strip().splitlines():
        fault, *marks = line.split()
        for column, mark in zip(COLUMNS, marks, strict=True):
            if mark != ".":
                yield _cell(column, fault, mark)


def _cell(column: Column, fault: str, mark: str) -> SnapshotCell:
    outcomes, reason = REASONS.get(mark) or (frozenset({OUTCOMES[mark.lower()]}), "")
    return SnapshotCell(column, fault, outcomes, reason, short=mark.isupper())
