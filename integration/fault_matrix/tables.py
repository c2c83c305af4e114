# SPDX-License-Identifier: Apache-2.0
"""The tables of the matrix, as the program plays and shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reference_runs import References

from liveshift.runtime.daemon.faultpoints import POINTS

from . import cell, forced_ways, snapshot_cell, snapshot_table, table
from .scene import Scene
from .snapshot_scene import SnapshotScene
from .verdict import AnyCell, Verdict

Play = Callable[[], Verdict]
OnScene = tuple[AnyCell, str, Play]
"""A cell, why it cannot be tried on this machine ("" if it can), and what plays it."""


@dataclass(frozen=True)
class Look:
    """How the cells of a table are shown: its points in their order, and the sign and the style of
    each outcome."""

    points: tuple[str, ...]
    signs: dict[str, tuple[str, str]]


_OF_MOVES = {
    table.MOVED: ("→", "green"),
    table.STAYED: ("=", "cyan"),
    table.ENDED: ("†", "yellow"),
}

LOOKS = {
    table.TABLE: Look(POINTS, _OF_MOVES),
    forced_ways.TABLE: Look(forced_ways.POINTS, _OF_MOVES),
    snapshot_table.TABLE: Look(
        snapshot_table.POINTS,
        {
            snapshot_table.TRAINED_ON: ("=", "cyan"),
            snapshot_table.REWOUND: ("←", "green"),
            snapshot_table.RESUMED: ("↑", "green"),
            snapshot_table.LOST: ("†", "yellow"),
        },
    ),
}


def all_cells(wanted: str, short: bool) -> list[AnyCell]:
    """The cells of all tables; as table.cells."""
    return [*_of_moves(wanted, short), *snapshot_table.cells(wanted, short)]


@contextmanager
def playing(
    wanted: str, short: bool, place: Path, references: References, stall_s: float
) -> Iterator[Iterator[OnScene]]:
    """Give the same cells, each to be played before the next one is asked for. Moves have a lab of
    their own, which is gone when snapshots begin; so have these."""
    moves = Scene(place, references, stall_s)
    snapshots = SnapshotScene(place, references, stall_s)

    def every() -> Iterator[OnScene]:
        for each in _of_moves(wanted, short):
            yield each, table.unavailable(each), partial(cell.play, each, moves)
        moves.strike()
        for other in snapshot_table.cells(wanted, short):
            yield other, "", partial(snapshot_cell.play, other, snapshots)

    try:
        yield every()
    finally:
        moves.strike()
        snapshots.strike()


def _of_moves(wanted: str, short: bool) -> list[table.Cell]:
    return [*table.cells(wanted, short), *forced_ways.cells(wanted, short)]
