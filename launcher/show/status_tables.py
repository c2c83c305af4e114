# SPDX-License-Identifier: Apache-2.0
"""The tables of ``liveshift status``."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from ... import units
from ...runtime.model.link_rates import bits
from ..report import quantities as q
from . import forecast, moves, protection, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from ...runtime.messages import (
        CapsuleRow,
        DataLink,
        GpuSeat,
        HostRow,
        JobRow,
        MigrationRow,
        Status,
    )

STYLES = {
    "running": "green",
    "up": "green",
    "starting": "cyan",
    "moving": "yellow",
    "unknown": "yellow",
    "rewinding": "yellow",
    "suspended": "cyan",
    "ending": "yellow",
    "tainted": "yellow",
    "cordoned": "yellow",
    "ended": "dim",
    "lost": "bold red",
}


EVERYTHING = 10**9
"""This number of lines means all lines."""


class Most(NamedTuple):
    """How many lines are shown at most."""

    jobs: int = EVERYTHING
    moves: int = EVERYTHING
    hosts: int = EVERYTHING


ALL = Most()


def parts(
    status: Status,
    *,
    wide: bool = False,
    hidden: int = 0,
    most: Most = ALL,
    one: bool = False,
) -> list[RenderableType]:
    """Return the journal's problem, jobs with their capsules, moves under way and hosts, to be
    shown one below the other.

    ``hidden``: the number of ended jobs that are left out. ``one``: a person has asked for one job.
    """
    found: list[RenderableType] = []
    if status.trouble:
        found += [Text(status.trouble, style="yellow"), Text()]
    if status.jobs:
        there = sum(1 + len(job.capsules) for job in status.jobs)
        found += [jobs(status, wide=wide, most=most.jobs), *_cut(there, most.jobs)]
        found += protection.lines(status.jobs, wide=wide, rewinds=one)
    elif not hidden:
        found.append(Text("no jobs; `liveshift run -- COMMAND` starts one", style="dim"))
    if hidden:
        found.append(Text(f"and {render.count(hidden, 'ended job')} more: --all", style="dim"))
    if status.moving:
        shown = status.moving[: most.moves]
        found += [Text(), moving(shown, wide=wide), *_cut(len(status.moving), most.moves)]
        found += map(Text, forecast.lines(shown))
    found += [Text(), hosts(status.hosts[: most.hosts], wide=wide)]
    found += _cut(len(status.hosts), most.hosts)
    found += [Text(text, style="yellow") for text in problems(status)]
    return [*found, *warnings(status.hosts, wide=wide)]


def _cut(there: int, most: int) -> list[Text]:
    """Return a line that says how many lines are left out; [] if none are."""
    return [Text(f"… and {there - most} more lines", style="dim")] if there > most else []


def jobs(status: Status, *, wide: bool, most: int = EVERYTHING) -> Table:
    """Return a line per job, and one per capsule below it; at most ``most`` lines."""
    columns = ["job", "state", "host", "epoch", "address", "ranks", "coll/s", "memory"]
    if wide:
        columns += ["pids", "collectives", "user", "age", "protected", "command"]
    numbers = ("epoch", "coll/s", "memory", "pids", "collectives", "age")
    table = render.table(*columns, right=numbers)
    for job in status.jobs:
        for cells in (_job(job, status.time, wide=wide), *map(_capsule, job.capsules)):
            if len(table.rows) < most:
                table.add_row(*(cells.get(column, "") for column in columns))
    return table


def moving(rows: list[MigrationRow], *, wide: bool) -> Table:
    """Return the migrations under way."""
    columns = ["moving", "from → to", "step", "progress", "bytes", "seconds"]
    table = render.table(*columns, *(["reason"] if wide else ()), right=("seconds",))
    for row in rows:
        cells: list[RenderableType] = [
            row.capsule,
            f"{row.source} → {row.destination}",
            Text(row.state, style="yellow"),
            moves.bar(row),
            moves.amount(row),
            f"{row.seconds:.1f}",
        ]
        table.add_row(*cells, *([row.reason] if wide else ()))
    return table


def hosts(rows: list[HostRow], *, wide: bool) -> Table:
    """Return the hosts, their free slots and memory, and who tainted them."""
    columns = ["host", *(("address", "data link") if wide else ())]
    columns += ["state", "slots", "spare", "free memory"]
    columns += ["GPUs"] if any(row.gpus for row in rows) else []
    columns += ["taint", *(("capsules",) if wide else ())]
    table = render.table(*columns, right=("slots", "free memory"))
    for row in rows:
        states = [row.state]
        states += ["tainted"] if row.taint is not None else []
        states += ["cordoned"] if row.cordon is not None else []
        taint = "" if row.taint is None else row.taint
        if row.taint_by:
            taint += f" (by {row.taint_by})"
        if row.cordon is not None:
            taint += f"{'; ' if taint else ''}cordoned by {row.cordon}"
        cells: dict[str, RenderableType] = {
            "host": row.name,
            "address": row.address,
            "data link": _link(row.link),
            "state": Text(", ").join(map(_state, states)),
            "slots": f"{row.used}/{row.slots}",
            "spare": row.spare,
            "free memory": q.size(row.memory_free),
            "GPUs": gpus(row.gpus),
            "taint": taint,
            "capsules": ", ".join(row.capsules),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def warnings(rows: list[HostRow], *, wide: bool) -> list[Text]:
    """Return what is wrong with the interfaces that images go over. Those that are up count only if
    ``wide``: a slow one keeps no move from going."""
    return [
        Text(f"{row.name}: {row.link.warning}", style="yellow")
        for row in rows
        if row.link is not None and row.link.warning and row.state == "up"
        if wide or not row.link.up
    ]


def problems(status: Status) -> Iterator[str]:
    """Yield what hosts run that the journal does not know, which hosts use another cluster file
    than the orchestrator, and which capsules' output cannot be kept, with what to do."""
    for row in status.unknown:
        job = row.capsule.partition("/")[0]
        text = f"{row.host} runs {row.capsule}, which the journal does not know ({row.command});"
        yield f"{text} `liveshift stop {job} --unknown {row.host}` ends it"
    if names := [row.name for row in status.hosts if row.other_file and row.state == "up"]:
        text = f"{', '.join(names)}: the cluster file there differs from the orchestrator's: copy"
        yield f"{text} the orchestrator's to it, and the agent loads it by itself"
    for capsule in (capsule for job in status.jobs for capsule in job.capsules):
        if capsule.output_trouble:
            yield f"{capsule.name} on {capsule.host}: {capsule.output_trouble}"


def _link(link: DataLink | None) -> str:
    """Return ``eth0, 25 Gbit/s; 9.4 Gbit/s to h1``."""
    if link is None or not link.interface:
        return "–"
    text = f"{link.interface}, {bits(link.speed)}" if link.speed else link.interface
    text += "" if link.up else ", down"
    return "; ".join([text, *(f"{bits(8 * r)} to {n}" for n, r in sorted(link.rates.items()))])


def gpus(seats: list[GpuSeat]) -> str:
    """Return ``H200 ×8 (3 free)``; several models are separated by commas."""
    models = dict.fromkeys(seat.name for seat in seats)
    return ", ".join(
        f"{model.removeprefix('NVIDIA ')} ×{sum(s.name == model for s in seats)}"
        f" ({sum(s.free for s in seats if s.name == model)} free)"
        for model in models
    )


def _job(job: JobRow, now: float, *, wide: bool) -> dict[str, RenderableType]:
    """Return the cells of a line by column. The user is looked up only for ``wide``."""
    return {
        "job": Text(job.name, style="bold"),
        "state": _state(job.state, job.code),
        "coll/s": "" if job.state in ("ended", "suspended") else _rate(job.rate),
        "user": _user(job.user) if wide else "",
        "age": render.clock(max(0.0, now - job.started)),
        "protected": protection.cell(job.protection) if wide else "",
        "command": job.command,
    }


def _capsule(capsule: CapsuleRow) -> dict[str, RenderableType]:
    over = capsule.state in ("ended", "suspended")
    return {
        "job": f"  {capsule.name}",
        "state": _state(capsule.state, capsule.code),
        "host": capsule.host,
        "epoch": str(capsule.epoch),
        "address": capsule.address,
        "ranks": units.ranges(capsule.ranks),
        "coll/s": "" if over else _rate(capsule.rate),
        "memory": "" if over else q.size(capsule.resident),
        "pids": str(capsule.pids),
        "collectives": str(capsule.collectives),
    }


def _rate(rate: float) -> str:
    return "–" if rate == 0 else q.figures(rate) if rate < 999.5 else f"{rate:.0f}"


def _state(state: str, code: int | None = None) -> Text:
    """Return a state, with the exit code if there is one."""
    text = Text(state, style=STYLES.get(state, ""))
    if code is None:
        return text
    return Text.assemble(text, (f" ({code})", "bold red" if code else "dim"))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
