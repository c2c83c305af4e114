# SPDX-License-Identifier: Apache-2.0
"""What ``liveshift status`` shows of the snapshots of jobs: a cell of the table, and lines below
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from ..report import quantities as q
from . import render

if TYPE_CHECKING:
    from ...runtime.messages import JobRow, ProtectionRow

STALE = 3
"""A snapshot that is older than so many intervals is reported without ``-o wide`` too."""


def cell(row: ProtectionRow | None) -> Text:
    """Return ``s17, 3 s ago, on h2``, ``no``, or ``–`` for a job without snapshots."""
    if row is None or not (row.every or row.newest):
        return Text("–" if row else "")
    if not row.newest:
        return Text("no", style="yellow")
    text = f"{row.newest}, {render.clock(row.age)} ago, on {', '.join(row.holders)}"
    return Text(f"no: {text}" if row.why_not else text, style="yellow" if row.why_not else "")


def lines(jobs: Iterable[JobRow], *, wide: bool) -> Iterator[Text]:
    """Yield what the cells have no room for. If not ``wide``, only why a job is not protected."""
    for job in jobs:
        row = job.protection
        if row is None or not (row.every or row.newest):
            continue
        if wide and row.newest:
            yield Text(f"{job.name}: {_snapshot(row)}")
            if not row.why_not:
                yield Text(f"{job.name}: {_failure(row)}")
        for text in _warnings(row, wide=wide):
            yield Text(f"{job.name}: {text}", style="yellow")


def _snapshot(row: ProtectionRow) -> str:
    often = f"a snapshot every {render.clock(row.every)}" if row.every else "no further snapshots"
    auto = " (auto)" if row.auto else ""
    paused = f", paused it for {q.pause(row.pause_s)}" if row.pause_s else ""
    holders = ", ".join(row.holders)
    return (
        f"{often}{auto}; {row.newest} takes {q.size(row.bytes)} of memory on {holders}{paused}, and"
        f" is {render.clock(row.age)} old"
    )


def _failure(row: ProtectionRow) -> str:
    how = "as the last rewind" if row.rewind_measured else "estimated"
    text = (
        f"a host that fails now would cost {render.clock(row.failure_s)} of training: what was"
        f" trained in {render.clock(row.age)} again, and {render.clock(row.rewind_s)} until it runs"
        f" ({how})"
    )
    where = ", ".join(row.in_place)
    return f"{text}; on hosts that live, {where} would go back in place" if where else text


def _warnings(row: ProtectionRow, *, wide: bool) -> Iterator[str]:
    if row.why_not:
        yield f"unprotected: {row.why_not}"
    elif row.would_wait and wide:
        yield row.would_wait
    stale = row.every and row.age > STALE * row.every
    if row.newest and row.trouble and (wide or stale):
        yield f"no later snapshot than {row.newest}: {row.trouble}"
