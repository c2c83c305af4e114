# SPDX-License-Identifier: Apache-2.0
"""The tables of ``liveshift inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ..report import quantities as q
from . import render

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ...interposer.inspection import DeviceUse, ProcessState
    from ...runtime.messages import Inspection

NOTHING = "no process of it has called a collective or CUDA yet"


def parts(found: list[Inspection], *, wide: bool) -> list[RenderableType]:
    """Return what is shown of each process, one below the other."""
    shown: list[RenderableType] = []
    for capsule in found:
        where = f"{capsule.capsule} on {capsule.host}"
        if not capsule.processes:
            shown += [Text.assemble((where, "bold"), f": {NOTHING}"), Text()]
        for process in capsule.processes:
            shown += [_title(where, process), *_process(process, wide=wide), Text()]
    return shown[:-1]


def _title(where: str, process: ProcessState) -> Text:
    rank = f"rank {process.rank}, " if process.rank is not None else ""
    driver = f", CUDA driver {_dotted(process.driver)}" if process.driver else ""
    return Text.assemble((where, "bold"), f": {rank}pid {process.pid} ({process.command}){driver}")


def _process(process: ProcessState, *, wide: bool) -> list[RenderableType]:
    shown: list[RenderableType] = [Text(f"  {_device(use)}") for use in process.devices]
    if process.driver:
        shown.append(Text(f"  {_counted(process)}"))
    if process.memory:
        shown.append(_memory(process))
    if process.communicators:
        shown.append(_communicators(process, wide=wide))
    if wide and process.begun:
        shown.append(_operations(process))
    for obstacle in process.obstacles:
        shown.append(Text.assemble(("  in the way: ", "bold red"), obstacle.what))
        shown.append(Text.assemble(("  hint: ", "bold cyan"), obstacle.hint))
    return shown


def _device(use: DeviceUse) -> str:
    text = f"GPU {use.device}: {q.size(use.bytes)}, {render.count(use.streams, 'stream')}"
    if use.carried:
        text += f", {use.carried} with communication"
    if use.capturing:
        text += f", {use.capturing} being captured"
    return text


def _counted(process: ProcessState) -> str:
    with_nccl = f" ({process.graphs_with_nccl} with NCCL)" if process.graphs_with_nccl else ""
    graphs = process.graphs + process.graph_execs
    return (
        f"{render.count(process.events, 'event')}, {render.count(graphs, 'graph')}{with_nccl}; "
        f"{process.made} allocations so far, {process.freed} freed"
    )


def _memory(process: ProcessState) -> Table:
    table = render.table("  memory", "kind", "pieces", "bytes", right=("pieces", "bytes"))
    for row in process.memory:
        place = "host" if row.device is None else f"GPU {row.device}"
        if row.device is None and not row.kind.startswith("host"):
            place = "–"
        table.add_row(f"  {place}", row.kind, str(row.count), q.size(row.bytes))
    return table


def _communicators(process: ProcessState, *, wide: bool) -> Table:
    columns = ["  communicator", "library", "state", "rank", "GPU", "operations"]
    if wide:
        columns += ["made by", "rebuilt", "id"]
    table = render.table(*columns, right=("operations", "rebuilt"))
    for row in process.communicators:
        cells = [
            f"  {row.name or row.ordinal}",
            row.library,
            row.state,
            f"{row.rank} of {row.size}",
            "–" if row.device is None else str(row.device),
            str(row.operations),
        ]
        if wide:
            cells += [row.made_by, str(row.generation), row.id or "none agreed"]
        table.add_row(*cells)
    return table


def _operations(process: ProcessState) -> Table:
    table = render.table("  operation", "begun", right=("begun",))
    for kind, count in process.begun.items():
        table.add_row(f"  {kind}", str(count))
    return table


def _dotted(number: int) -> str:
    """Return CUDA's version number as people write it: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
