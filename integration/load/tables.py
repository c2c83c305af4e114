# SPDX-License-Identifier: Apache-2.0
"""The figures as tables, and how they grow with the number of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .figures import Around, Run, Spread

Column = tuple[str, Callable[[Run], str]]


def _ms(spread: Spread) -> str:
    values = (1e3 * spread.median, 1e3 * spread.p99, 1e3 * spread.worst)
    return " / ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values)


def _pair(spread: Spread) -> str:
    return f"{spread.median:.2f} / {spread.worst:.2f}"


def _around(around: Around) -> str:
    return f"{around.crowd:.1f} + {around.others:.1f}"


REST: list[Column] = [
    ("hosts", lambda r: str(r.hosts)),
    ("capsules", lambda r: f"{r.capsules:,}"),
    ("core busy", lambda r: f"{100 * r.rest.cores:.0f} %"),
    ("memory, MB", lambda r: f"{r.rest.resident / 1e6:.0f}"),
    ("files", lambda r: str(r.rest.descriptors)),
    ("messages/s", lambda r: f"{r.rest.messages_per_s:,.0f}"),
    ("beat, ms", lambda r: _ms(r.rest.heartbeat)),
    ("status, ms", lambda r: _ms(r.rest.status)),
    ("status, kB", lambda r: f"{r.rest.status_bytes / 1e3:,.0f}"),
    ("cores around", lambda r: _around(r.rest.around)),
]
MOVES: list[Column] = [
    ("hosts", lambda r: str(r.hosts)),
    ("done", lambda r: f"{r.moves.done}/{r.moves.asked}"),
    ("all done, s", lambda r: f"{r.moves.seconds:.2f}"),
    ("one, s", lambda r: _pair(r.moves.each)),
    ("stood, s", lambda r: _pair(r.moves.frozen)),
    ("CPU each, ms", lambda r: f"{1e3 * r.moves.cpu_each:.0f}"),
    ("messages/s", lambda r: f"{r.moves.messages_per_s:,.0f}"),
    ("beat, ms", lambda r: _ms(r.moves.heartbeat)),
    ("status, ms", lambda r: _ms(r.moves.status)),
    ("cores around", lambda r: _around(r.moves.around)),
]
COMING: list[Column] = [
    ("hosts", lambda r: str(r.hosts)),
    ("all up, s", lambda r: f"{r.connect_s:.1f}"),
    ("jobs started, s", lambda r: f"{r.start_s:.1f}"),
    ("… CPU, s", lambda r: f"{r.start_cpu:.1f}"),
    ("jobs ended, s", lambda r: f"{r.end_s:.1f}"),
    ("… CPU, s", lambda r: f"{r.end_cpu:.1f}"),
]
KILLED: list[Column] = [
    ("hosts", lambda r: str(r.hosts)),
    ("all up, s", lambda r: f"{r.restart.seconds:.1f}"),
    ("migrations settled, s", lambda r: f"{r.restart.settled_s:.1f}"),
    ("of them done", lambda r: f"{r.restart.moved}/{r.restart.asked}"),
    ("CPU, s", lambda r: f"{r.restart.cpu:.1f}"),
]
GROWTH: list[tuple[str, Callable[[Run], float]]] = [
    ("core busy at rest", lambda r: r.rest.cores),
    ("resident", lambda r: r.rest.resident),
    ("beat, median", lambda r: r.rest.heartbeat.median),
    ("status, median", lambda r: r.rest.status.median),
    ("all up", lambda r: r.connect_s),
    ("jobs started, CPU per capsule", lambda r: r.start_cpu / r.capsules),
    ("CPU per migration", lambda r: r.moves.cpu_each),
    ("all migrations done", lambda r: r.moves.seconds),
    ("restart", lambda r: r.restart.seconds),
    ("restart, CPU", lambda r: r.restart.cpu),
    ("jobs ended, CPU per capsule", lambda r: r.end_cpu / r.capsules),
]


def tables(runs: Sequence[Run]) -> Group:
    """All of it.

    Times with slashes are median / 99th percentile / worst, or median / worst; cores around are
    those that the simulated hosts kept busy + those that others' programs did.
    """
    moves = runs[0].moves
    parts = [
        _table("At rest: heartbeats, and one look at the status a second", REST, runs),
        _table(
            f"{moves.asked} migrations asked for at once, meanwhile (simulated steps alone: one"
            f" {moves.floor:.2f} s, standing {moves.frozen_floor:.2f} s)",
            MOVES,
            runs,
        ),
        _table("Coming and going", COMING, runs),
        _table("The orchestrator killed amid as many migrations", KILLED, runs),
    ]
    if len(runs) > 1:
        parts.append(_growth(runs))
    return Group(*parts)


def _table(title: str, columns: Sequence[Column], runs: Sequence[Run]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(*(show(run) for _, show in columns))
    return table


def _growth(runs: Sequence[Run]) -> Table:
    """As a multiple of the first run; red where it grew faster than the number of hosts."""
    first = runs[0]
    table = Table(
        title=f"Growth: times what it was with {first.hosts} hosts",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("")
    for run in runs:
        table.add_column(f"{run.hosts} hosts", justify="right", no_wrap=True)
    for name, value in GROWTH:
        cells = []
        for run in runs:
            grown = value(run) / value(first) if value(first) > 0 else 0.0
            style = "red" if grown > 1.5 * run.hosts / first.hosts else ""
            cells.append(Text(f"× {grown:.1f}" if grown else "–", style=style))
        table.add_row(name, *cells)
    return table
