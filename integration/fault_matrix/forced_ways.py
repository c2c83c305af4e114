# SPDX-License-Identifier: Apache-2.0
"""The table of forced ways plays some cells of the table of moves again. There memory goes in
rounds; here the order of the move forces another way.

The way must not change what a harm leads to. So a cell expects what the same cell of the table of
moves expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import table
from .scene import Order
from .table import Cell, picked

TABLE = "forced ways"

ORDERS = {
    "stop": Order(way="stop"),
    "round": Order(way="round"),
    "haste": Order(way="auto", within=0.2),
}
"""liveshift cannot keep a deadline of 0.2 s, so it does all that makes a move faster."""

HELD_AT = ("orchestrator.precopied", "source.locked", "source.dumped", "destination.restoring")
"""The first two points come before the source sends the rest of the memory, the third while it
does, the last one after that."""

POINTS = tuple(f"{order}:{point}" for order in ORDERS for point in HELD_AT)

FAULTS = (
    "orchestrator-killed",
    "source-agent-killed",
    "destination-agent-killed",
    "image-used-up",
    "dump-killed",
    "capsule-killed-at-source",
    "cut-source-destination",
    "source-cut-off",
    "source-power-lost",
    "destination-power-lost",
    "images-full",
    "out-of-memory",
    "bits-flipped",
    "source-agent-stalled",
    "destination-agent-stalled",
)
"""These faults hit memory on its way, or a daemon that sends or takes it."""

SHORT = {
    "stop:source.dumped/source-agent-killed",
    "stop:source.dumped/bits-flipped",
    "round:source.dumped/destination-power-lost",
    "haste:orchestrator.precopied/cut-source-destination",
}


@dataclass(frozen=True)
class ForcedCell(Cell):
    """``forced``: a name of ORDERS."""

    forced: str = ""

    @property
    def table(self) -> str:
        return TABLE

    @property
    def point(self) -> str:
        return f"{self.forced}:{self.held_at}"


def cells(wanted: str = "", short: bool = False) -> list[ForcedCell]:
    """As table.cells."""
    return picked(_all(), wanted, short)


def _all() -> Iterator[ForcedCell]:
    usual = {(cell.fault, cell.held_at): cell for cell in table.cells()}
    for fault in FAULTS:
        for forced, order in ORDERS.items():
            for point in HELD_AT:
                if same := usual.get((fault, point)):
                    cell = ForcedCell(
                        point, fault, same.expected, same.reason, False, order, forced
                    )
                    yield replace(cell, short=cell.name in SHORT)
