# SPDX-License-Identifier: Apache-2.0
"""What ``liveshift status`` shows of the snapshots of jobs: a cell of the table, and lines below
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from ...units import day_time, some
from ..report import quantities as q
from . import render

if TYPE_CHECKING:
    from ...runtime.messages import JobRow, ProtectionRow

STALE = 3
"""A snapshot that is older than so many intervals is reported without ``-o wide`` too."""

RECENT_S = 3600.0
"""Where a rewind led is reported without ``-o wide`` too for so many seconds after its end."""


def cell(row: ProtectionRow | None) -> Text:
    """Return ``s17, 3 s ago, on h2``, ``no``, or ``–`` for a job without snapshots."""
    if row is None or not (row.every or row.newest):
        return Text("–" if row else "")
    if not row.newest:
        return Text("no", style="yellow")
    where = ", ".join(row.holders) or row.directory
    text = f"{row.newest}, {render.clock(row.age)} ago, on {where}"
    return Text(f"no: {text}" if row.why_not else text, style="yellow" if row.why_not else "")


def lines(jobs: Iterable[JobRow], *, wide: bool, rewinds: bool = False) -> Iterator[Text]:
    """Yield what the cells have no room for. If not ``wide``, only why a job is not protected, and
    where its last rewind led, if that is recent or with ``rewinds``."""
    for job in jobs:
        row = job.protection
        if row is not None and row.rewound_to:
            to, again = day_time(row.rewound_to), render.clock(row.repeated_s)
            if wide or rewinds or row.rewound_ago_s < RECENT_S:
                yield Text(f"{job.name}: rewound to boundary of {to}, {again} of training repeated")
        if row is None or not (row.every or row.newest):
            continue
        if job.state == "suspended" and row.newest:
            yield from _suspended(job.name, row)
            continue
        if wide and row.newest:
            yield Text(f"{job.name}: {_snapshot(row)}")
            if not (row.why_not or row.rewinding):
                yield Text(f"{job.name}: {_failure(row)}")
        if row.rewinding:
            yield Text(f"{job.name}: {row.rewinding}", style="bold red")
        if row.silent:
            yield Text(f"{job.name}: {row.silent}", style="bold red")
        for text in _warnings(row, wide=wide):
            yield Text(f"{job.name}: {text}", style="yellow")


def _suspended(job: str, row: ProtectionRow) -> Iterator[Text]:
    place = f"the memory of {', '.join(row.holders)}" if row.holders else row.directory
    where = f"{q.size(row.bytes)} in {place}"
    yield Text(f"{job}: suspended {render.clock(row.age)} ago; {row.newest} is {where}")
    if row.why_not:
        yield Text(f"{job}: cannot be resumed now: {row.why_not}", style="yellow")
    elif row.alone:
        has = "has" if len(row.alone) == 1 else "have"
        text = f"{some(row.alone, 8)} {has} the only copy of an image of it, so far"
        yield Text(f"{job}: {text}", style="yellow")


def _snapshot(row: ProtectionRow) -> str:
    holders = ", ".join(row.holders)
    parts = [f"{row.newest} is {render.clock(row.age)} old, {q.size(row.bytes)} on {holders}"]
    if row.pause_s:
        parts.append(f"the job was paused for {q.pause(row.pause_s)}")
    if row.takes_s:
        parts.append(f"one is complete after {q.seconds(row.takes_s)}")
    every = f"a snapshot every {render.clock(row.every)}" if row.every else "no further snapshots"
    if row.auto:
        rate = f"; a failure every {render.clock(row.mttf_s)}: {row.mttf_from}"
        every += f" (auto{rate if row.mttf_s else ''})"
    return "; ".join([*parts, every])


def _failure(row: ProtectionRow) -> str:
    age, rewind = int(row.age), round(row.rewind_s)  # so that the sum is right as it is shown
    how = "as the last time" if row.rewind_measured else "estimated"
    text = (
        f"if a host failed now: {render.clock(age + rewind)} lost, of which {render.clock(age)} are"
        f" trained again, and {render.clock(rewind)} pass until the job runs ({how})"
    )
    if row.would_wait:
        text += ", unless the job has to wait"
    if not row.in_place:
        return text
    text += f"; {_names(row.in_place)} would go back in place where the host lives"
    if not row.sent:
        return f"{text}, from a copy there"
    which = "their images" if row.sent == row.in_place else f"the image of {_names(row.sent)}"
    return f"{text}, with {which} sent by the holder"


def _names(capsules: Sequence[str]) -> str:
    return " and ".join(capsules) if len(capsules) < 3 else some(capsules, 8)


def _warnings(row: ProtectionRow, *, wide: bool) -> Iterator[str]:
    from ...runtime.messages import NOT_YET

    if row.why_not and (wide or row.why_not != NOT_YET):
        yield f"unprotected: {row.why_not}"
    elif row.would_wait and wide and not row.rewinding:
        yield row.would_wait
    stale = row.every and row.age > STALE * row.every
    if row.newest and row.trouble and (wide or stale):
        yield f"no later snapshot than {row.newest}: {row.trouble}"
